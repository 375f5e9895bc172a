"""A run's checkpoints: when it saves, which one it starts from, which ones it sets aside."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

from torch import Tensor

from common.files import METRICS
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.resume_point import ResumePoint, agree_on_start, checkpoint_directory, left_behind
from trainer.checkpoint.snapshot import HostCopy
from trainer.config import TrainConfig
from trainer.devices.base import Device
from trainer.optim.schedule import stable_steps
from trainer.parallel.mesh import Mesh
from trainer.parallel.shares import without_padding
from trainer.parallel.tensor import TensorParallel
from trainer.state import TrainState


class Checkpointer:
    """Saves a run's state while training continues. Its methods are collective: all workers call them together."""

    def __init__(self, config: TrainConfig, device: Device, mesh: Mesh, log: Callable[[str], None]) -> None:
        """Remove unfinished checkpoints of dead runs. Raises `DiskError`."""
        self._config, self._device, self._mesh, self._log = config, device, mesh, log
        #: The step of the phase that a longer run can go on from; 0: none.
        self._stable = stable_steps(config.schedule, max_steps=config.max_steps, decay_share=config.decay_share)
        self._manager = CheckpointManager(
            checkpoint_directory(config), keep=config.num_ckpts_to_keep, log=log,
            never_pruned=config.phase1_end_step + self._stable if 0 < self._stable < config.max_steps else None,
            rank=mesh.tensor_parallel_rank, size=mesh.tensor_parallel_size, timeout_s=config.collective_timeout_s,
        )  # fmt: skip
        self._host_copy: HostCopy | None = None
        self._saved_at, self._saved_step = time.monotonic(), -1
        if mesh.is_root and not config.trial:
            self._manager.prepare()

    def find_start(self) -> ResumePoint | None:
        """The checkpoint to start from; None for initial weights. Raises `UserError`."""
        return agree_on_start(self._config, self._manager, self._mesh, self._log)

    def begin(
        self,
        start: ResumePoint | None,
        state: TrainState,
        tensors: tuple[dict[str, Tensor], dict[str, Tensor]],
        vocab_size: int,
        tensor_parallel: TensorParallel,
    ) -> None:
        """Prepare for training from `state`: set aside checkpoints of other branches and allocate the host copy.

        `tensors`: the model's and the optimizer's, by name. Raises `DiskError`.
        """
        config, mesh = self._config, self._mesh
        # Before the first step, the checkpoint that the run started from already holds its state.
        self._saved_at, self._saved_step = time.monotonic(), -1 if start is None else state.step
        if config.trial:
            return
        if mesh.is_root:
            self._manager.set_aside(left_behind(config, self._manager, start), config.output_dir / METRICS)
        if mesh.data_parallel_rank == 0:
            if config.minimal_ckpt:
                self._log("the checkpoint that ends the phase will hold the weights only")
            stored = functools.partial(without_padding, vocab_size=vocab_size, ranks=tensor_parallel)
            self._host_copy = HostCopy(*tensors, self._device.host_memory, stored)
            self._manager.begin(self._host_copy.touch)

    def is_due(self, state: TrainState) -> bool:
        """Whether a checkpoint of `state` is due; always False on workers other than the root."""
        if not self._mesh.is_root:
            return False
        steps, minutes = self._config.ckpt_interval_steps, self._config.ckpt_interval_minutes
        due = state.step > 0 and (state.step == self._stable or (steps > 0 and state.step % steps == 0))
        return due or (minutes > 0 and time.monotonic() - self._saved_at >= 60 * minutes)

    def has_saved(self, state: TrainState) -> bool:
        return self._saved_step == state.step

    def save(self, state: TrainState) -> None:
        """Start writing a checkpoint from a copy of `state`. Raises the previous write's error."""
        self._saved_at, self._saved_step = time.monotonic(), state.step
        self.wait()
        if self._host_copy is not None:
            self._manager.finish()
            snapshot = self._host_copy.take(state, self._device.copy_to_host)
            is_last = state.step >= self._config.max_steps
            self._manager.save(snapshot.minimal() if is_last and self._config.minimal_ckpt else snapshot)

    def check(self) -> None:
        """Raise the error of a failed write, without waiting for one in progress."""
        self._manager.check()

    def wait(self) -> None:
        """Wait until no worker is writing a checkpoint."""
        self._mesh.wait_while(lambda: self._manager.is_writing)

    def finish(self) -> None:
        """Wait until this worker's last checkpoint is durable. Raises the write's error."""
        self._manager.finish()

    def close(self) -> None:
        """Wait until every worker's last checkpoint is durable. Raises the write's error."""
        self.wait()
        self.finish()
