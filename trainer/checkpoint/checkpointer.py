"""A run's checkpoints: when it saves, which one it starts from, which ones it sets aside."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from common.console import print_line
from common.errors import UserError
from common.files import METRICS
from trainer.checkpoint.gather import OptimizerShares
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.resume_point import ResumePoint, agree_on_start, checkpoint_directory, left_behind
from trainer.checkpoint.snapshot import HostCopy, Snapshot
from trainer.checkpoint.stable import ends_stable_part
from trainer.config import TrainConfig
from trainer.devices.base import Device
from trainer.parallel.mesh import Mesh
from trainer.parallel.shares import without_padding
from trainer.parallel.tensor import TensorParallel
from trainer.registry import stable_steps
from trainer.state import TrainState

#: Seconds that one tensor-parallel rank waits for the others' shares after the loss of a worker. torchrun kills the
#: remaining workers after 30.
_PATIENCE_S = 20.0


class Checkpointer:
    """Saves a run's state while training continues. All workers call `find_start`, `save`, `wait` and `close`
    together."""

    def __init__(self, config: TrainConfig, device: Device, mesh: Mesh, log: Callable[[str], None]) -> None:
        """Remove unfinished checkpoints of dead runs. Raises `DiskError`."""
        self._config, self._device, self._mesh, self._log = config, device, mesh, log
        #: The step of the phase that a longer run can continue from; 0: none.
        self._stable = stable_steps(config.schedule, max_steps=config.max_steps, decay_share=config.decay_share)
        self._manager = CheckpointManager(
            checkpoint_directory(config), keep=config.num_ckpts_to_keep, is_kept=self._begins_decay, log=log,
            rank=mesh.tensor_parallel_rank, size=mesh.tensor_parallel_size, timeout_s=config.collective_timeout_s,
        )  # fmt: skip
        self._host_copy: HostCopy | None = None
        #: None in a trial.
        self._shares: OptimizerShares | None = None
        #: This worker's state, if it has all of it (None in a trial), and the part of each tensor that is stored.
        self._live: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None
        self._stored: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor
        self._saved_at, self._saved_step = time.monotonic(), -1
        if mesh.is_root and not config.trial:
            self._manager.prepare()

    def _begins_decay(self, step: int, path: Path) -> bool:
        """Whether a longer run of this phase, or of the one before it, can continue from this checkpoint at best."""
        before = self._config.phase1_end_step
        if step <= before:
            return ends_stable_part(path)
        return step - before == self._stable < self._config.max_steps

    def find_start(self) -> ResumePoint | None:
        """The checkpoint to start from; None for initial weights. Raises `UserError`."""
        return agree_on_start(self._config, self._manager, self._mesh, self._log)

    def begin(
        self,
        start: ResumePoint | None,
        state: TrainState,
        model: dict[str, Tensor],
        shares: OptimizerShares,
        vocab_size: int,
        tensor_parallel: TensorParallel,
    ) -> None:
        """Prepare for training from `state`: set aside checkpoints of other branches and allocate the host copy.

        `model`: its tensors by name; `shares`: the optimizer's. Raises `DiskError`.
        """
        config, mesh = self._config, self._mesh
        self._saved_at = time.monotonic()
        # The checkpoint that the run started from already holds its state, if it is the run's own. That of another
        # phase does for step 0.
        if start is not None and (start.checkpoint.parent == self._manager.directory or state.step == 0):
            self._saved_step = state.step
        if config.trial:
            return
        if mesh.is_root:
            self._manager.set_aside(left_behind(config, self._manager, start), config.output_dir / METRICS)
        self._shares = shares
        # A worker that keeps only a share of the state has nothing to save without the others.
        self._live = None if shares.are_shared else (model, shares.everything())
        self._stored = functools.partial(without_padding, vocab_size=vocab_size, ranks=tensor_parallel)
        if mesh.data_parallel_rank == 0:
            if config.minimal_ckpt:
                self._log("the checkpoint that ends the phase will hold the weights only")
            self._host_copy = HostCopy(model, shares.everything(), self._device.host_memory, self._stored)
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
        if self._shares is None:
            return
        if self._host_copy is None:
            self._shares.send()
            return
        self._manager.finish()
        taken = self._host_copy.take(state, self._device.copy_to_host, self._shares.receive)
        self._manager.save(self._to_store(taken))

    def save_alone(self, state: TrainState, record: Callable[[TrainState], None]) -> None:
        """After the loss of a worker: save `state` from the live tensors, if this worker's model has replicas.

        The remaining workers no longer communicate: among those that hold the same state, the first to get here saves
        it. One of them calls `record` first, to record the steps up to `state`. At most the step under way is then
        repeated (just-in-time checkpointing: Gupta et al. 2024, doi:10.1145/3627703.3650085).
        Raises `DiskError`.
        """
        directory, mesh = self._manager.directory, self._mesh
        if self._live is None or mesh.data_parallel_size == 1 or state.step == 0 or not directory.is_dir():
            return
        if mesh.tensor_parallel_size == 1:  # else a write under way may wait for a lost worker
            with contextlib.suppress(UserError):
                self._manager.finish()
        stored = ({name: self._stored(name, t) for name, t in tensors.items()} for tensors in self._live)
        manager = CheckpointManager(
            directory, keep=-1, rank=mesh.tensor_parallel_rank, size=mesh.tensor_parallel_size, timeout_s=_PATIENCE_S
        )
        if manager.save_alone(self._to_store(Snapshot(state, *stored)), functools.partial(record, state)):
            print_line(f"worker {mesh.rank} has saved step {state.global_step}: another worker is lost")

    def _to_store(self, snapshot: Snapshot) -> Snapshot:
        is_last = snapshot.state.step >= self._config.max_steps
        return snapshot.minimal() if is_last and self._config.minimal_ckpt else snapshot

    def check(self) -> None:
        """Raise the error of a failed write, without waiting for one in progress."""
        self._manager.check()

    def wait(self) -> None:
        """Wait until no worker is writing a checkpoint. Raises the error of this worker's write, without waiting for
        the others: they may be waiting for its share."""

        def is_writing() -> bool:
            self._manager.check()
            return self._manager.is_writing

        self._mesh.wait_while(is_writing)

    def finish(self) -> None:
        """Wait until this worker's last checkpoint is durable. Raises the write's error."""
        self._manager.finish()

    def finish_after_error(self, *, soon: bool = False) -> None:
        """Let this worker's write end after an error, which matters more than the write's. `soon`: the write may wait
        for other workers, so only as long as torchrun lets this one live."""
        with contextlib.suppress(Exception):
            self._manager.finish(_PATIENCE_S if soon else None)

    def close(self) -> None:
        """Wait until every worker's last checkpoint is durable. Raises the write's error."""
        self.wait()
        self.finish()
