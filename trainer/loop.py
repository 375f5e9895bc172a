"""The training loop: one phase, one worker."""

from __future__ import annotations

import dataclasses
import functools
import signal
import time
from collections.abc import Callable
from types import FrameType

import numpy as np
import torch

from trainer.checkpoint.manager import CheckpointManager, Snapshot
from trainer.config import TrainConfig
from trainer.data.loader import BatchReader, Loader, Step, record_samples
from trainer.data.order import ORDER_VERSION, SampleOrder, hash64
from trainer.data.shards import ShardSet
from trainer.devices.base import Device
from trainer.files import failpoint
from trainer.metrics import Metrics, StepRecord
from trainer.models.bert import BertForPreTraining, has_weight_decay
from trainer.optim.adamw import AdamW
from trainer.optim.buffers import ParameterBuffers
from trainer.optim.schedule import linear_warmup_decay
from trainer.parallel.mesh import Mesh
from trainer.precision import Precision
from trainer.process import STOP_SIGNALS
from trainer.resume import find_start, load_into, say_start
from trainer.state import TrainState


class Trainer:
    """Trains one phase to `config.stop_step`, from wherever its checkpoints say it is."""

    def __init__(self, config: TrainConfig, device: Device, mesh: Mesh, say: Callable[[str], None]) -> None:
        self.config, self.device, self.mesh = config, device, mesh
        self.manager = CheckpointManager(config.output_dir / "checkpoints", keep=config.num_ckpts_to_keep, say=say)
        if mesh.is_root:
            self.manager.prepare()
        start = find_start(config, self.manager)
        mesh.barrier()

        global_batch_size = config.global_batch_size(mesh.data_parallel_size)
        shards = ShardSet.open(config.data_dir, seq_len=config.seq_len, max_pred_len=config.max_pred_len)
        order = SampleOrder(shards.rows_per_shard, seed=config.seed, global_batch_size=global_batch_size)
        self.loader = Loader(
            BatchReader(shards, vocab_size=config.model.vocab_size, static_shapes=device.static_shapes),
            order,
            micro_batch_size=config.micro_batch_size,
            rank=mesh.data_parallel_rank,
            size=mesh.data_parallel_size,
        )
        self.precision = Precision(_precision(config, device, None if start is None else start.state, say))
        self.state = TrainState(
            phase=config.phase,
            step=0,
            global_step=config.phase1_end_step,
            samples_consumed=0,
            epoch=0,
            seed=config.seed,
            global_batch_size=global_batch_size,
            data=shards.identity,
            order_version=ORDER_VERSION,
            optimizer=config.optimizer,
            precision=self.precision.name,
            model=dataclasses.asdict(config.model),
            data_parallel_size=mesh.data_parallel_size,
            tensor_parallel_size=mesh.tensor_parallel_size,
            micro_batch_size=config.micro_batch_size,
            torch_version=torch.__version__,
        )
        self.model = BertForPreTraining(config.model, device.operations)
        if start is None:
            self.model.initialise(config.seed)
        else:
            self.state.require_same_model(start.state, start.checkpoint)
            load_into(dict(self.model.named_parameters()), start.checkpoint, "model")
        self.model.to(device.torch_device, self.precision.dtype).train()
        self.buffers = ParameterBuffers(self.model, has_weight_decay)
        self.optimizer = AdamW(self.buffers, weight_decay=config.weight_decay)
        if start is not None and not start.weights_only:
            self.state.require_same_run(start.state, start.checkpoint)
            load_into(self.optimizer.state(), start.checkpoint, "optimizer")
            self.state = self.state.at(start.state)
            self.optimizer.set_steps_done(self.state.step)
        say_start(start, self.state, say)
        self.metrics = Metrics(config, self.state, is_root=mesh.is_root, say=say)
        self._saved_at = time.monotonic()
        self._saved_step = self.state.step if start is not None and not start.weights_only else -1
        self._stop_signal: int | None = None

    def run(self) -> bool:
        """Train; True when `stop_step` is reached, False when a signal ended it earlier. The state is saved in both
        cases. Raises `NonFiniteLoss`, `DiskError`."""
        for signum in STOP_SIGNALS:
            signal.signal(signum, self._on_signal)
        steps = self.loader.steps(self.state.step, self.config.stop_step)
        upcoming = next(steps, None)
        masked_tokens, stop, _ = self._agree(upcoming)
        self.metrics.start_clock()
        while upcoming is not None and not stop:
            self.train_step(upcoming, masked_tokens)
            upcoming = next(steps, None)
            masked_tokens, stop, save = self._agree(upcoming)
            if save and upcoming is not None and not stop:
                self.save()
            self.manager.check()
        if self._saved_step != self.state.step:
            self.save()
        self.device.finish_closures()
        self.manager.finish()
        self.metrics.close(self.state, workers=self.mesh.world_size)
        return self.state.step >= self.config.stop_step

    def train_step(self, step: Step, masked_tokens: int) -> None:
        """One optimizer step. `masked_tokens`: masked positions in the global batch.

        Every loss is a sum divided by the global batch's count, so that neither the cut into micro-batches nor the
        number of workers has a part in the result.
        """
        config = self.config
        if config.record_samples:
            record_samples(step, config.output_dir / f"samples-{self.mesh.rank}.jsonl")
        self.buffers.start_step()
        for usteps, batch in enumerate(step.micro_batches):
            failpoint(f"micro-step:{self.state.global_step}.{usteps}.{self.mesh.rank}")
            micro_batch = usteps * self.mesh.data_parallel_size + self.mesh.data_parallel_rank
            self.device.seed(seed_of(config.seed, self.state.global_step, micro_batch))
            with self.precision.forward_context(self.device.torch_device.type):
                masked_lm, next_sentence = self.model(self.device.put(batch))
            masked_lm = masked_lm / max(1, masked_tokens)
            next_sentence = next_sentence / self.state.global_batch_size
            (masked_lm + next_sentence).backward()
            self.buffers.add_extras(masked_lm.detach(), next_sentence.detach())
        losses = self.buffers.reduce(self.mesh.all_reduce)
        norm = self.buffers.clip(config.max_grad_norm)
        learning_rate = linear_warmup_decay(
            step.index, peak=config.lr, warmup_steps=config.warmup_steps, max_steps=config.max_steps
        )
        self.optimizer.step(learning_rate)
        self.state = self.state.advanced(step.epoch)
        failpoint(f"step:{self.state.global_step}.{self.mesh.rank}")
        record = functools.partial(self.metrics.record, StepRecord(self.state, learning_rate))
        self.device.step_closure(record, torch.cat([losses, norm[None]]))

    def save(self) -> None:
        """Start a checkpoint of the state as it is now; later steps do not change what it holds."""
        self.device.finish_closures()  # a step that went wrong is found before it is saved
        self._saved_at, self._saved_step = time.monotonic(), self.state.step
        if not self.mesh.is_root:
            return
        copy = self.device.to_host
        optimizer = {} if self.config.minimal_ckpt else self.optimizer.state()
        self.manager.finish()
        self.manager.save(
            Snapshot(
                self.state,
                model={name: copy(p) for name, p in self.model.named_parameters()},
                optimizer={name: copy(tensor) for name, tensor in optimizer.items()},
            )
        )

    def _agree(self, upcoming: Step | None) -> tuple[int, bool, bool]:
        """What all workers hold after this step: masked positions in the next global batch, whether to stop, whether
        to save. The root decides when it is time to save; any worker's signal stops all."""
        save = self.mesh.is_root and self._time_to_save()
        mine = (upcoming.masked_tokens if upcoming else 0, self._stop_signal is not None, save)
        masked_tokens, stop, save_votes = self.mesh.sum_on_host([int(value) for value in mine])
        return masked_tokens, stop > 0, save_votes > 0

    def _time_to_save(self) -> bool:
        steps, minutes = self.config.ckpt_interval_steps, self.config.ckpt_interval_minutes
        due = steps > 0 and self.state.step > 0 and self.state.step % steps == 0
        return due or (minutes > 0 and time.monotonic() - self._saved_at >= 60 * minutes)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._stop_signal = signum


def seed_of(seed: int, global_step: int, micro_batch: int) -> int:
    """The seed of what is random in one micro-batch: a number in [0, 2⁶³)."""
    return int(hash64(seed, global_step, index=np.array([micro_batch], dtype=np.uint64))[0] >> np.uint64(1))


def _precision(config: TrainConfig, device: Device, resumed: TrainState | None, say: Callable[[str], None]) -> str:
    if config.precision != "auto":
        return config.precision
    if resumed is not None and resumed.phase == config.phase:
        return resumed.precision
    name, reason = device.automatic_precision()
    say(f"precision {name}: {reason}")
    return name
