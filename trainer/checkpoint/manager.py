"""Save, find and prune the checkpoints of one run.

A thread writes a host copy of the state while training continues: one write at a time, its error raised at the next
step. An older checkpoint is removed only when the new one is durable and as many newer ones as the run keeps are known
to be valid. Tensor-parallel ranks write their shards concurrently; rank 0 waits for all and completes the checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common.errors import CheckpointError, DiskError, UserError
from common.files import (
    TEMPORARY_SUFFIX,
    disk_errors,
    failpoint,
    read_json,
    rename_durably,
    replace_json,
    sweep_temporaries,
    write_json,
)
from trainer.checkpoint.directory import Unreadable, checkpoint_path, checkpoints, set_aside, why_invalid
from trainer.checkpoint.format import tensor_file, write_manifest, write_tensors
from trainer.checkpoint.snapshot import Snapshot
from trainer.parallel.threads import use_one_core

#: File in which a rank reports that it has begun, has finished or has failed, and rank 0's polling interval.
_NOTE, _POLL_S = "rank-{:02}.json", 0.05


class CheckpointManager:
    """The checkpoints below `directory`."""

    def __init__(
        self, directory: Path, *, keep: int, is_kept: Callable[[int, Path], bool] = lambda step, path: False,
        log: Callable[[str], None] = print, rank: int = 0, size: int = 1, timeout_s: float = 600,
    ) -> None:  # fmt: skip
        """`keep`: checkpoints to keep, -1 for all; `is_kept`: whether to keep one besides, by global step and path;
        `log`: receives messages, such as why a checkpoint is skipped.

        `rank` of `size`: tensor-parallel rank; `timeout_s`: how long rank 0 waits for the others to begin writing.
        """
        self.directory = directory
        self._rank, self._size, self._timeout_s = rank, size, timeout_s
        self._keep, self._is_kept = keep, is_kept
        self._log = log
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint", initializer=use_one_core)
        self._pending: Future[None] | None = None
        #: Fully verified, or written by this process.
        self._whole: set[Path] = set()
        #: Skipped because of read errors; they may be valid.
        self.unreadable: list[Path] = []

    def prepare(self) -> None:
        """Create the directory and remove unfinished checkpoints of dead runs. Raises `DiskError`."""
        with disk_errors(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            for name in sweep_temporaries(self.directory):
                self._log(f"removed the unfinished checkpoint {name}")

    def paths(self) -> list[tuple[int, Path]]:
        """(global step, path) of every entry with a checkpoint's name, newest first. Raises `CheckpointError`."""
        try:
            return checkpoints(self.directory)
        except OSError as error:
            raise CheckpointError(f"cannot read {self.directory}: {error.strerror}; check its permissions") from error

    def why_invalid(self, path: Path) -> str | None:
        """Why `path` is not a valid checkpoint, None if it is; reads every byte."""
        reason = why_invalid(path)
        if reason is None:
            self._whole.add(path)
        return reason

    def valid(self) -> Iterator[Path]:
        """Yield valid checkpoints, newest first; logs why others are skipped."""
        for _, path in self.paths():
            reason = self.why_invalid(path)
            if reason is None:
                yield path
            else:
                self._log(f"skipping checkpoint {path}: {reason}")
                if isinstance(reason, Unreadable):
                    self.unreadable.append(path)

    def set_aside(self, paths: Iterable[Path], records: Path) -> None:
        """Move the checkpoints `paths` (newest first) aside, with a copy of the metrics `records`; logs the new path.

        Raises `DiskError`.
        """
        paths = list(paths)
        place = set_aside(self.directory, paths, records)
        if place is not None:
            names = ", ".join(path.name for path in paths)
            self._log(f"set aside {names}, which training continues without: now in {place}")

    def save(self, snapshot: Snapshot) -> None:
        """Start writing `snapshot` after the previous write; raises the previous write's error."""
        final = self._path_of(snapshot)
        self.begin(functools.partial(self._write, snapshot, final.with_name(final.name + TEMPORARY_SUFFIX)))

    def save_alone(self, snapshot: Snapshot, record: Callable[[], None]) -> bool:
        """Write `snapshot` in this thread, unless another worker is writing or has written the same; one of the writers
        calls `record` first. Returns whether this worker has completed it. Raises `DiskError`."""
        final = self._path_of(snapshot)
        claim = final.with_name(f"{final.name}.rank-{self._rank}{TEMPORARY_SUFFIX}")  # swept at the next start
        with disk_errors(claim):
            try:
                claim.touch(exist_ok=False)
            except FileExistsError:
                return False
        if final.exists():
            return False
        if self._rank == 0:
            record()
        self._write(snapshot, final.with_name(f"{final.name}.alone{TEMPORARY_SUFFIX}"))
        return self._rank == 0

    def _path_of(self, snapshot: Snapshot) -> Path:
        return checkpoint_path(self.directory, snapshot.state.global_step)

    def begin(self, work: Callable[[], None]) -> None:
        """Start `work` in the writer thread after the previous write; raises the previous write's error."""
        self.finish()
        self._pending = self._writer.submit(work)

    def check(self) -> None:
        """Raise the error of a failed write, without waiting for one in progress."""
        if self._pending is not None and self._pending.done():
            self.finish()

    @property
    def is_writing(self) -> bool:
        """Whether `finish` would wait."""
        return self._pending is not None and not self._pending.done()

    def finish(self, timeout_s: float | None = None) -> None:
        """Wait until the write in progress is durable; raises its error, or `TimeoutError`."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result(timeout_s)

    def _write(self, snapshot: Snapshot, temporary: Path) -> None:
        final = self._path_of(snapshot)
        try:
            with disk_errors(temporary):
                temporary.mkdir(exist_ok=self._size > 1)
                if self._rank:
                    replace_json(temporary / _NOTE.format(self._rank), {})
            files = write_shard(temporary, snapshot, self._rank, self._size)
            if self._rank:
                write_json(temporary / _NOTE.format(self._rank), {"files": files})
                return
            files += self._others_files(temporary)
            write_manifest(temporary, snapshot.state.global_step, snapshot.state.to_json(), files)
            rename_durably(temporary, final)
            self._whole.add(final)
        except UserError as error:
            if self._rank:
                # Rank 0 would wait for this shard.
                with contextlib.suppress(OSError):
                    replace_json(temporary / _NOTE.format(self._rank), {"error": str(error)})
            elif self._size == 1:  # other ranks may still be writing there; `prepare` removes it later
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._prune()

    def _others_files(self, directory: Path) -> list[dict[str, Any]]:
        """Wait for the other ranks' files and return their manifest entries. Raises `DiskError`, for theirs too."""
        files: list[dict[str, Any]] = []
        deadline = time.monotonic() + self._timeout_s
        for rank in range(1, self._size):
            # No timeout once a rank has begun: if it dies, the launcher ends this rank too.
            while not (note := read_json(directory / _NOTE.format(rank))):
                if note is None and time.monotonic() > deadline:
                    raise DiskError(
                        f"{directory}: rank {rank} has not begun its share within {self._timeout_s:g} s; is the "
                        f"directory the same for all workers? run the command again to resume from the last checkpoint"
                    )
                time.sleep(_POLL_S)
            if "error" in note:
                raise DiskError(f"rank {rank} has not written its share: {note['error']}")
            files += note["files"]
        with disk_errors(directory):
            for rank in range(1, self._size):
                (directory / _NOTE.format(rank)).unlink(missing_ok=True)
        return files

    def _prune(self) -> None:
        """Remove checkpoints older than the newest `keep` valid ones, except those that are kept besides."""
        found = [path for step, path in self.paths() if not self._is_kept(step, path)]
        if self._keep < 0 or len(found) <= self._keep:
            return
        whole = 0
        for path in found:
            if whole < max(1, self._keep):
                whole += path in self._whole or self.why_invalid(path) is None
                continue
            doomed = path.with_name(path.name + TEMPORARY_SUFFIX)
            with disk_errors(path):
                path.rename(doomed)
            failpoint(f"prune:{path.name}")
            shutil.rmtree(doomed, ignore_errors=True)  # what a reader on NFS still has open stays until the next sweep


def write_shard(directory: Path, snapshot: Snapshot, rank: int = 0, size: int = 1) -> list[dict[str, Any]]:
    """Write the tensors of tensor-parallel rank `rank` of `size`; returns their manifest entries.

    Ranks may write concurrently; one of them writes the manifest for all ranks' files at the end.
    """
    metadata = {"format": "pt", "step": str(snapshot.state.global_step)}
    files = [write_tensors(directory / tensor_file("model", rank, size), snapshot.model, metadata)]
    if snapshot.optimizer:
        files.append(write_tensors(directory / tensor_file("optimizer", rank, size), snapshot.optimizer, metadata))
    return files


def require_valid(path: Path) -> None:
    """Raise `CheckpointError` unless `path` is a valid checkpoint; reads every byte."""
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint {path}; give a ckpt_<step> directory")
    reason = why_invalid(path)
    if reason is not None:
        raise CheckpointError(f"checkpoint {path} cannot be used: {reason}; give another one")
