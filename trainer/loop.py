"""The training loop: one phase, one worker."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import time
from collections.abc import Callable, Sequence

import torch

from common.errors import NonFiniteStep, UserError
from common.files import METRICS, failpoint
from trainer.checkpoint.format import MASTER
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.resume_point import ResumePoint, agree_on_start, checkpoint_directory, left_behind
from trainer.checkpoint.snapshot import HostCopy
from trainer.config import TrainConfig
from trainer.data.loader import Loader, Step, record_samples
from trainer.data.order import SampleOrder
from trainer.devices.base import Device
from trainer.devices.graphs import GraphList
from trainer.gradients import arrange
from trainer.launch.preemption import Interruptions
from trainer.metrics import Metrics, StepRecord
from trainer.optim.parameters import SharedModel
from trainer.optim.schedule import learning_rate
from trainer.optim.select import make_optimizer
from trainer.parallel.mesh import Mesh
from trainer.parallel.plan import split_of
from trainer.parallel.shares import without_padding
from trainer.parallel.tensor import TensorParallel
from trainer.precision import Precision
from trainer.replicas import flip_a_bit, require_finite_steps, require_sound
from trainer.resume import beginning, data_identity, load_into, resolve_precision, resume_state, say_start
from trainer.seeds import derive_seed
from trainer.workloads.base import Workload

#: Workers of a machine that hold a copy of the model in host memory at the same time while they start.
_LOADING_AT_ONCE = 8
#: Seconds, about, between two questions whether to stop within a step that is longer than that.
_ASK_INTERVAL_S = 5.0


class Trainer:
    """Trains one phase to `config.stop_step`, from wherever its checkpoints say it is."""

    def __init__(
        self,
        config: TrainConfig,
        workload: Workload,
        device: Device,
        mesh: Mesh,
        say: Callable[[str], None],
        *,
        interruptions: Interruptions,
        skipped: Sequence[int] = (),
    ) -> None:
        """`skipped`: batches to leave out, beside those of the checkpoint."""
        self.config, self.device, self.mesh = config, device, mesh
        self.manager = CheckpointManager(
            checkpoint_directory(config), keep=config.num_ckpts_to_keep, say=say,
            rank=mesh.tensor_parallel_rank, size=mesh.tensor_parallel_size, timeout_s=config.collective_timeout_s,
        )  # fmt: skip
        self.ranks = TensorParallel(
            mesh.tensor_parallel_rank,
            mesh.tensor_parallel_size,
            lambda tensors, sums: device.all_reduce(tensors, mesh.tensor_parallel_group, sums=sums),
            device.random_region,
        )
        if mesh.is_root and not config.trial:
            self.manager.prepare()
        start = agree_on_start(config, self.manager, mesh, say)

        size = config.global_batch_size(mesh.data_parallel_size)
        left_out = [*skipped, *([] if start is None or start.weights_only else start.state.skipped)]
        order = SampleOrder(workload.rows_per_shard, seed=config.seed, global_batch_size=size, skipped=left_out)
        self.loader = Loader(
            workload.reader(static_shapes=device.static_shapes),
            order,
            micro_batch_size=config.micro_batch_size,
            rank=mesh.data_parallel_rank,
            size=mesh.data_parallel_size,
        )
        name = resolve_precision(config, device, None if start is None else start.state, say)
        self.precision = Precision(name, device.round_stochastically)
        data = mesh.by_root(functools.partial(data_identity, config, workload, say))
        self.state = beginning(config, workload, mesh, start, data=data, precision=name, skipped=skipped)
        mesh.in_turns(functools.partial(self._make_model, workload, start), at_once=_LOADING_AT_ONCE)
        self.losses = len(workload.losses)
        self._shared = None
        if self.ranks.size > 1:
            self._shared = SharedModel(
                lambda name: split_of(name) is not None, self.ranks.reduce_in_place, self.ranks.region
            )
        self.forward, self.parameters = arrange(
            config.data_parallel, self.model, workload, device, mesh, self.precision, self._shared
        )
        self._number = functools.partial(device.number, dtype=self.precision.dtype)
        self.optimizer = make_optimizer(
            config.optimizer,
            self.parameters,
            weight_decay=config.weight_decay,
            number=self._number if device.compiles_steps else None,
            ranks=self._shared,
        )
        if start is not None and not start.weights_only:
            self.state = resume_state(self.state, start, config, say)
            if start.state.step < config.max_steps:  # a finished phase needs none, and may have none (--minimal_ckpt)
                mesh.in_turns(functools.partial(self._load_optimizer, start, workload), at_once=_LOADING_AT_ONCE)
            self.optimizer.set_steps_done(self.state.step)
        say_start(start, self.state, say)
        if mesh.is_root and not config.trial:
            self.manager.set_aside(left_behind(config, self.manager, start), config.output_dir / METRICS)
        saves = mesh.data_parallel_rank == 0 and not config.trial
        self._host_copy = self._prepare_saving(workload, say) if saves else None
        writes = mesh.is_root and not config.trial
        peak = device.peak_flops_per_s(self.precision.name) if writes else None
        self.metrics = Metrics(
            config, workload, self.state, peak_flops_per_s=peak and peak * mesh.world_size, is_root=writes, say=say
        )
        self._graphs = GraphList(config, device, say) if mesh.is_root and config.graphs is not None else None
        self._saved_at = time.monotonic()
        # Before its first step a run has nothing to save that is not in the checkpoint it started from.
        self._saved_step = -1 if start is None else self.state.step
        self._interruptions = interruptions
        #: Micro-steps between two questions whether to stop; until one step has been measured, one.
        self._ask_usteps = 1

    def _make_model(self, workload: Workload, start: ResumePoint | None) -> None:
        """The model on its device, with initial weights or those of `start`."""
        self.model = workload.make_model(self.device.operations, self.ranks)
        if start is None:
            self.model.initialise(self.config.seed)
        else:
            self.state.require_same_model(start.state, start.checkpoint)
            load_into(dict(self.model.named_parameters()), start, "model", workload.vocab_size, self.ranks)
        self.model.to(self.device.torch_device, self.precision.dtype).train()
        self.device.finish_closures()  # until then a lazy device keeps the host's copy

    def _load_optimizer(self, start: ResumePoint, workload: Workload) -> None:
        load_into(self.optimizer.state(), start, "optimizer", workload.vocab_size, self.ranks)
        self.device.finish_closures()

    def run(self) -> bool:
        """Train; True when `stop_step` is reached, False when a signal ended it earlier. The state is saved in both
        cases. Raises `NonFiniteStep`, `ReplicasDiffer`, `DiskError`."""
        try:
            return self._run()
        except UserError as error:
            with contextlib.suppress(UserError):
                self.manager.finish()  # a checkpoint that is being written is still good
            if isinstance(error, NonFiniteStep):
                self.metrics.abandon()
                error.batch = self.loader.batch_of(self.state.step - 1) if error.batch < 0 else error.batch
            raise

    def _run(self) -> bool:
        self._interruptions.begin()
        steps = self.device.feed(self.loader.steps(self.state.step, self.config.stop_step))
        upcoming = next(steps, None)
        counts, stop, save = self._agree(upcoming)
        self.metrics.start_clock()
        while upcoming is not None and not stop:
            if save:
                self.save()
            elif self._time_to_compare():
                self._require_sound()
            began = time.monotonic()
            if not self.train_step(upcoming, counts):
                break
            upcoming = next(steps, None)
            counts, stop, save = self._agree(upcoming, step_s=time.monotonic() - began)
            self.manager.check()
            if self._graphs is not None:
                self._graphs.check()
        self.save()
        self.device.finish_closures()
        self.mesh.wait_while(lambda: self.manager.is_writing)
        self.manager.finish()
        self.metrics.close(self.state, workers=self.mesh.world_size)
        if self._graphs is not None:
            self._graphs.close()
        return self.state.step >= self.config.stop_step

    def train_step(self, step: Step, counts: list[int]) -> bool:
        """One optimizer step. `counts`: what each loss is a sum over in the global batch, and other counts of it.
        False: the run is to stop, and the step was given up before it changed the state.

        Every loss is a sum divided by the global batch's count, so that neither the cut into micro-batches nor the
        number of workers has a part in the result.
        """
        config = self.config
        if config.record_samples:
            record_samples(step, config.output_dir / f"samples-{self.mesh.rank}.jsonl")
        shares = [self._number(1 / max(1, count)) for count in counts[: self.losses]]
        failpoint(f"batch:{step.batch}.{self.mesh.rank}", lambda: shares.__setitem__(0, self._number(math.nan)))
        for usteps, batch in enumerate(step.micro_batches):
            if usteps and usteps % self._ask_usteps == 0 and self.mesh.sum_on_host([self._interruptions.must_stop])[0]:
                return False
            failpoint(f"micro-step:{self.state.global_step}.{usteps}.{self.mesh.rank}")
            micro_batch = usteps * self.mesh.data_parallel_size + self.mesh.data_parallel_rank
            self._seed(derive_seed(config.seed, "dropout", self.state.global_step, micro_batch))
            is_last = usteps + 1 == config.grad_accum_usteps
            with self.forward.micro_step(is_last=is_last):
                with self.precision.forward_context(self.device.torch_device.type):
                    sums = self.forward(batch)
                parts = [loss * share for loss, share in zip(sums, shares, strict=True)]
                self.forward.backward(functools.reduce(operator.add, parts))
            self.parameters.add_extras(torch.stack([part.detach() for part in parts]).flatten())
        self.device.end_micro_steps()
        losses = self.parameters.reduce(lambda tensors: self.device.all_reduce(tensors, self.mesh.data_parallel_group))
        largest = self._number(config.max_grad_norm) if config.max_grad_norm else None
        norm = self.parameters.clip(largest, self._shared)
        rate = learning_rate(
            config.schedule, step.index,
            peak=config.lr, warmup_steps=config.warmup_steps, max_steps=config.max_steps,
        )  # fmt: skip
        self._seed(derive_seed(config.seed, "stochastic rounding", self.state.global_step))
        self.optimizer.step(rate)
        self.parameters.zero_gradients()
        self.state = self.state.advanced(step.epoch)
        failpoint(f"step:{self.state.global_step}.{self.mesh.rank}", lambda: flip_a_bit(next(self.model.parameters())))
        record = StepRecord(self.state, rate, counts, self.device.compiled_graphs())
        self.device.step_closure(functools.partial(self.metrics.record, record), torch.cat([losses, norm[None]]))
        return True

    def _seed(self, seed: int) -> None:
        """Seed all that is random until the next call."""
        self.device.seed(seed)
        self.ranks.seed(seed)

    def _tensors(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The model's tensors and the optimizer's, as checkpoints name them."""
        masters = {f"{MASTER}.{name}": tensor for name, tensor in self.parameters.masters().items()}
        return dict(self.model.named_parameters()), self.optimizer.state() | masters

    def _require_sound(self) -> None:
        """A step that went wrong, on any worker, is found before it is saved. Raises `AgreedError`."""
        self.device.finish_closures()
        require_finite_steps(self.metrics.not_finite, self.loader.batch_of, self.mesh)
        if not self.config.trial:
            model, optimizer = self._tensors()
            require_sound({**model, **optimizer}, self.state.global_step, self.device, self.mesh)

    def _time_to_compare(self) -> bool:
        steps = self.config.replica_check_steps
        return self.mesh.data_parallel_size > 1 and steps > 0 and self.state.step % steps == 0

    def _prepare_saving(self, workload: Workload, say: Callable[[str], None]) -> HostCopy:
        model, optimizer = self._tensors()
        if self.config.minimal_ckpt:
            say("the checkpoint that ends the phase will hold the weights only")
        stored = functools.partial(without_padding, vocab_size=workload.vocab_size, ranks=self.ranks)
        copy = HostCopy(model, optimizer, self.device.host_memory, stored)
        self.manager.begin(copy.touch)
        return copy

    def save(self) -> None:
        """Start a checkpoint of the state as it is now, if there is none; later steps do not change what it holds."""
        if self._saved_step == self.state.step:
            return
        self._require_sound()
        self.metrics.flush(durable=True)  # all steps of a checkpoint are recorded
        failpoint(f"recorded:{self.state.global_step}")
        self._saved_at, self._saved_step = time.monotonic(), self.state.step
        self.mesh.wait_while(lambda: self.manager.is_writing)
        if self._host_copy is not None:
            self.manager.finish()
            snapshot = self._host_copy.take(self.state, self.device.copy_to_host)
            is_last = self.state.step >= self.config.max_steps
            self.manager.save(snapshot.minimal() if is_last and self.config.minimal_ckpt else snapshot)

    def _agree(self, upcoming: Step | None, *, step_s: float | None = None) -> tuple[list[int], bool, bool]:
        """What all workers hold after this step: the counts of the next global batch, whether to stop, whether to
        save. The root decides when it is time to save, and, from the seconds the step took, how often to ask in the
        next; what any worker was asked for holds for all."""
        save = self._interruptions.take_save() or (self.mesh.is_root and self._time_to_save())
        ask_usteps = self._ask_usteps
        if step_s is not None:
            ask_usteps = max(1, round(self.config.grad_accum_usteps * _ASK_INTERVAL_S / max(step_s, 1e-9)))
        counts = upcoming.counts if upcoming else ()
        if self.mesh.tensor_parallel_rank:
            counts = tuple(0 for _ in counts)  # the ranks that share a model have the same samples
        is_bad = self.metrics.not_finite is not None
        mine = [is_bad, self._interruptions.must_stop, save, ask_usteps if self.mesh.is_root else 0]
        *totals, bad, stop, saves, self._ask_usteps = self.mesh.sum_on_host([*counts, *mine])
        if bad:
            self.device.finish_closures()
            require_finite_steps(self.metrics.not_finite, self.loader.batch_of, self.mesh)
        return totals, stop > 0, saves > 0

    def _time_to_save(self) -> bool:
        steps, minutes = self.config.ckpt_interval_steps, self.config.ckpt_interval_minutes
        due = steps > 0 and self.state.step > 0 and self.state.step % steps == 0
        return due or (minutes > 0 and time.monotonic() - self._saved_at >= 60 * minutes)
