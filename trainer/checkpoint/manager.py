"""Saves, finds and prunes the checkpoints of one run.

Saving copies the state to host memory (`Snapshot`) and writes it from a thread while training goes on: one write at
a time, its failure raised at the next step, older checkpoints removed only once the new one is durable.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from trainer.checkpoint.format import MANIFEST, STATE, encode_manifest, tensor_file, why_invalid, write_tensors
from trainer.errors import CheckpointError, UserError
from trainer.files import (
    TEMPORARY_SUFFIX,
    disk_errors,
    durable_file,
    fsync_directory,
    rename_durably,
    sha256_of,
    sweep_temporaries,
    write_json,
)
from trainer.state import TrainState

_NAME = re.compile(r"ckpt_(\d+)")


@dataclass(frozen=True)
class Snapshot:
    """A state at rest in host memory: parameters and moments by name."""

    state: TrainState
    model: dict[str, Tensor]
    #: Empty in a minimal checkpoint.
    optimizer: dict[str, Tensor]


class CheckpointManager:
    """The checkpoints below `directory`."""

    def __init__(self, directory: Path, *, keep: int, say: Callable[[str], None] = print) -> None:
        """`keep`: how many to keep, -1 all; `say`: told when a checkpoint is skipped, and why."""
        self.directory = directory
        self._keep = keep
        self._say = say
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def prepare(self) -> None:
        """Make the directory and sweep unfinished checkpoints of dead runs. Raises `DiskError`."""
        with disk_errors(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            for name in sweep_temporaries(self.directory):
                self._say(f"removed the unfinished checkpoint {name}")

    def paths(self) -> list[tuple[int, Path]]:
        """(global step, path) of everything named like a checkpoint, newest first."""
        if not self.directory.is_dir():
            return []
        found = [(int(m[1]), path) for path in self.directory.iterdir() if (m := _NAME.fullmatch(path.name))]
        return sorted(found, reverse=True)

    def valid(self, step: int = -1) -> Iterator[Path]:
        """Whole checkpoints, newest first (only that of global step `step`, unless -1); says why it skips others."""
        for at, path in self.paths():
            if step not in (-1, at):
                continue
            reason = why_invalid(path)
            if reason is None:
                yield path
            else:
                self._say(f"skipping checkpoint {path}: {reason}")

    def save(self, snapshot: Snapshot) -> None:
        """Start writing `snapshot`, once the write before is finished. Raises that one's error."""
        self.finish()
        self._pending = self._writer.submit(self._write, snapshot)

    def check(self) -> None:
        """Raise the error of a write that failed since; do not wait for one that is under way."""
        if self._pending is not None and self._pending.done():
            self.finish()

    def finish(self) -> None:
        """Wait until the write under way is durable. Raises its error."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write(self, snapshot: Snapshot) -> None:
        final = self.directory / f"ckpt_{snapshot.state.global_step}"
        temporary = final.with_name(final.name + TEMPORARY_SUFFIX)
        try:
            with disk_errors(temporary):
                temporary.mkdir()
            write_snapshot(temporary, snapshot)
            # Only a damaged one can be there already: a valid one would have been resumed from.
            rename_durably(temporary, final)
        except UserError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._prune()

    def _prune(self) -> None:
        if self._keep < 0:
            return
        for _, path in self.paths()[max(1, self._keep) :]:
            doomed = path.with_name(path.name + TEMPORARY_SUFFIX)
            with disk_errors(path):
                path.rename(doomed)
                shutil.rmtree(doomed)


def write_snapshot(directory: Path, snapshot: Snapshot) -> None:
    """Write the files of a checkpoint into the existing, empty `directory`. Raises `DiskError`."""
    metadata = {"format": "pt", "step": str(snapshot.state.global_step)}
    files = [write_tensors(directory / tensor_file("model", 0, 1), snapshot.model, metadata)]
    if snapshot.optimizer:
        files.append(write_tensors(directory / tensor_file("optimizer", 0, 1), snapshot.optimizer, metadata))
    state = directory / STATE
    write_json(state, snapshot.state.to_json())
    files.append({"path": STATE, "bytes": state.stat().st_size, "sha256": sha256_of(state)})
    with durable_file(directory / MANIFEST) as file:
        file.write(encode_manifest(snapshot.state.global_step, files))
    fsync_directory(directory)


def require_valid(path: Path) -> None:
    """Raise `CheckpointError` unless `path` is a whole checkpoint."""
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint {path}; give a ckpt_<step> directory")
    reason = why_invalid(path)
    if reason is not None:
        raise CheckpointError(f"checkpoint {path} cannot be used: {reason}; give another one")
