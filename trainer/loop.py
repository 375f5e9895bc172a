"""The training loop: one phase, one worker."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import sys
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from common.errors import AgreedError, UserError
from common.files import failpoint
from trainer import build
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.gather import OptimizerShares
from trainer.data.batch import Batch
from trainer.data.loader import Step
from trainer.devices.graphs import GraphList
from trainer.launch.agreement import Agreement
from trainer.launch.failure import is_loss
from trainer.launch.preemption import Requests
from trainer.metrics.metrics import CHECKPOINT_STALL, DATA_WAIT, Metrics, StepRecord
from trainer.replicas import ReplicaCheck, flip_a_bit
from trainer.resume import initial_state, resolve_precision, resume
from trainer.run import Run
from trainer.seeds import derive_seed


class Trainer:
    """Trains one phase to `config.stop_step`, from wherever its checkpoints say it is."""

    def __init__(self, run: Run, requests: Requests, skipped: Sequence[int] = ()) -> None:
        """`skipped`: batches to leave out, in addition to those the checkpoint leaves out. Raises `UserError`."""
        self.config, self.workload, self.device, self.mesh = run.config, run.workload, run.device, run.mesh
        self.tensor_parallel = build.build_tensor_parallel(run.device, run.mesh)
        self.checkpointer = Checkpointer(run.config, run.device, run.mesh, run.log)
        start = self.checkpointer.find_start()
        self.precision = resolve_precision(run, start)
        self.state = initial_state(run, start, self.precision, skipped)
        self.model = build.build_model(run, self.state, start, self.precision, self.tensor_parallel)
        self.forward, self.parameters = build.build_parameters(run, self.model, self.precision, self.tensor_parallel)
        self._number = functools.partial(run.device.number, dtype=self.precision.dtype)
        self._all_reduce = functools.partial(run.device.all_reduce, group=run.mesh.data_parallel_group)
        self.optimizer = build.build_optimizer(run, self.parameters, self._number)
        self.lr_schedule = build.build_lr_schedule(run.config)
        self.tensors = build.checkpoint_tensors(self.model, self.parameters, self.optimizer)
        model, optimizer = self.tensors
        shares = OptimizerShares(run.mesh, optimizer, are_shared=run.config.shard_optimizer)
        self.state = resume(run, self.state, start, self.optimizer, self.tensor_parallel, shares.elsewhere)
        doctor = build.build_doctor(run, self.model, self.parameters)
        self.dataloader = build.build_dataloader(run, self.precision, self.state, doctor)
        self.checkpointer.begin(start, self.state, model, shares, run.workload.vocab_size, self.tensor_parallel)
        self.replicas = ReplicaCheck(run, model, optimizer, are_shared=shares.are_shared)
        self.metrics = Metrics(run, self.state, doctor)
        self.graphs = GraphList(run.config, run.device, run.log, is_root=run.mesh.is_root)
        self.agreement = Agreement(run.mesh, requests)
        #: Whether weights and moments are those of `state`.
        self._is_whole = True

    def train(self) -> bool:
        """Train; True when `stop_step` is reached, False when a signal ended it earlier. The state is saved in both
        cases. Raises `NonFiniteStep`, `ReplicasDiffer`, `DiskError`."""
        try:
            self._train()
        except AgreedError:  # a checkpoint under way is still good; all workers wait for it, and for each other
            with contextlib.suppress(RuntimeError):  # another worker is lost: this error is the cause
                self.mesh.patiently(self.checkpointer.finish_after_error)
            raise
        except UserError:
            self.checkpointer.finish_after_error()
            raise
        except Exception as error:
            if is_loss(error):
                self._save_alone()
            self.checkpointer.finish_after_error(soon=self.mesh.world_size > 1)
            raise
        return self.state.step >= self.config.stop_step

    def _train(self) -> None:
        self.agreement.begin()
        for step in self._steps():
            decision = self.agreement.before_step(
                step.counts, not_finite=self.metrics.saw_non_finite, save=self.checkpointer.is_due(self.state)
            )
            if decision.not_finite:
                self.metrics.require_finite()
            self.checkpointer.check()
            self.graphs.check()
            if decision.stop:
                break
            if decision.save:
                self.save()
            elif self.replicas.is_due(self.state):
                self._require_sound()
            if not self.train_step(step, decision.counts):
                break
        self.save()
        self.device.finish_closures()
        self.checkpointer.close()
        self.metrics.close(self.state)
        self.graphs.close()

    def _steps(self) -> Iterator[Step]:
        steps = self.device.feed(self.dataloader.steps(self.state.step, self.config.stop_step))
        while True:
            with self.metrics.waiting(DATA_WAIT):
                step = next(steps, None)
            if step is None:
                return
            yield step

    def train_step(self, step: Step, counts: list[int]) -> bool:
        """One optimizer step. `counts`: how many terms each loss has in the global batch, then the workload's others.
        Returns False if the run is to stop: the step was given up before it changed the state.

        Every loss is a sum times its factor, divided by the global batch's count, so the result depends on neither the
        micro-batch size nor the number of workers, except through what a micro-batch draws: dropout, sampled softmax.
        """
        config = self.config
        self.metrics.begin_step(step)
        factors, divisor = self.device.loss_factors(counts[: len(self.workload.losses)])
        weights = [self._number(a * b) for a, b in zip(factors, self.workload.losses.values(), strict=True)]
        failpoint(f"batch:{step.batch}.{self.mesh.rank}", lambda: weights.__setitem__(0, self._number(math.nan)))
        with self._step_context(), self.device.operations.step_context():
            for ustep, batch in enumerate(step.micro_batches):
                if self.agreement.stops_before(ustep):
                    return False
                self.micro_step(ustep, batch, weights, is_last=ustep + 1 == step.micro_steps)
        self.device.end_micro_steps()
        factor = None if divisor == 1 else self._number(1 / divisor)
        in_bf16 = config.grad_reduce_in_bf16 and self.mesh.data_parallel_size > 1
        losses = self.parameters.reduce(self._all_reduce, factor, in_bf16=in_bf16)
        norm = self.parameters.clip(self._number(config.max_grad_norm) if config.max_grad_norm else None)
        lr = self.lr_schedule(step.index)
        rounding = (self.state.global_step, *self.parameters.rounding_seed)
        self._seed(derive_seed(config.seed, "stochastic rounding", *rounding))
        self.optimizer.prepare()
        self._is_whole = False
        self.optimizer.step(lr)
        self.parameters.exchange()
        self.state = self.state.advanced(step.epoch, len(step.samples) * self.mesh.data_parallel_size)
        self._is_whole = True
        self.parameters.zero_gradients()
        failpoint(f"step:{self.state.global_step}.{self.mesh.rank}", lambda: flip_a_bit(next(self.model.parameters())))
        micro_batches = step.micro_steps * self.mesh.data_parallel_size
        record = StepRecord(self.state, lr, counts, micro_batches, self.device.compiled_graphs())
        self.device.step_closure(functools.partial(self.metrics.record, record), torch.cat([losses, norm[None]]))
        return True

    def _step_context(self) -> contextlib.AbstractContextManager[object]:
        if self.device.compiles_steps or self.device.compiler is not None:  # each graph converts what it needs
            return contextlib.nullcontext()
        return self.precision.step_context(self.device.torch_device.type)

    def micro_step(self, ustep: int, batch: Batch, weights: Sequence[float | Tensor], *, is_last: bool) -> None:
        """Forward and backward of one micro-batch; `weights`: the factor of each loss."""
        failpoint(f"micro-step:{self.state.global_step}.{ustep}.{self.mesh.rank}")
        micro_batch = ustep * self.mesh.data_parallel_size + self.mesh.data_parallel_rank
        self._seed(derive_seed(self.config.seed, "dropout", self.state.global_step, micro_batch))
        with self.forward.micro_step(is_last=is_last):
            with self.precision.forward_context(self.device.torch_device.type):
                sums = self.forward(batch)
            losses = [loss * weight for loss, weight in zip(sums, weights, strict=True)]
            self.forward.backward(functools.reduce(operator.add, losses))
        self.parameters.add_extras(torch.stack([loss.detach() for loss in losses]).flatten())

    def save(self) -> None:
        """Start a checkpoint of the current state, unless there is one. Raises `AgreedError`, `DiskError`."""
        if self.checkpointer.has_saved(self.state):
            return
        self._require_sound()
        self.metrics.flush(durable=True)  # a checkpoint's steps are all recorded
        with self.metrics.waiting(CHECKPOINT_STALL):
            failpoint(f"recorded:{self.state.global_step}")
            self.checkpointer.save(self.state)

    def _save_alone(self) -> None:
        """After the loss of another worker: save the last whole step, if this one can still read it."""
        if self._is_whole and self.device.outlives_collectives and not self.metrics.saw_non_finite:
            try:
                self.replicas.require_finite()
                self.checkpointer.save_alone(self.state, self.metrics.record_alone)
            except UserError as error:
                sys.stderr.write(f"worker {self.mesh.rank} could not save step {self.state.global_step}: {error}\n")

    def _require_sound(self) -> None:
        """Find a step that went wrong, on any worker, before it is saved. Raises `AgreedError`."""
        self.metrics.require_finite()
        self.replicas.require_equal(self.state)

    def _seed(self, seed: int) -> None:
        """Seed every random draw until the next call."""
        self.device.seed(seed)
        self.tensor_parallel.seed(seed)
