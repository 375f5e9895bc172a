"""Begin a training with the last stable checkpoint of an earlier one, linked into its own directory."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from common.console import log
from common.errors import LockHeld
from common.files import (
    METRICS,
    TEMPORARY_SUFFIX,
    disk_errors,
    durable_file,
    fsync_directory,
    hard_link,
    rename_durably,
    write_json,
)
from pipeline.status.chain import StageTask
from pipeline.status.extension import EXTENDED_FROM, StableCheckpoint, shared_identity, stable_checkpoints
from pipeline.status.stage_dirs import StageDir, StageDirs
from stages.directory.lock import hold
from trainer.checkpoint.directory import CHECKPOINTS, checkpoints, why_invalid


def extend(task: StageTask) -> None:
    """Give the training `task`, whose lock is held, the last stable checkpoint of one that is the same up to that step.

    The trainer then continues from it as after an interruption. Without one, or with checkpoints of its own, nothing
    changes. An unfinished training that runs is not read, and every byte is verified; what is skipped is logged. Raises
    `DiskError`.
    """
    if checkpoints(task.directory / CHECKPOINTS):
        return
    (task.directory / EXTENDED_FROM).unlink(missing_ok=True)
    refused = False
    by_directory = groupby(stable_checkpoints(task, StageDirs(task.settings.work_dir)), lambda found: found.stage_dir)
    for stage_dir, found in by_directory:
        try:
            with _kept(stage_dir):
                for stable in found:
                    reason = why_invalid(stable.path)
                    if reason is None:
                        _link(stable, task)
                        log(f"{task.label}: continues from {stable}, up to which the two are the same")
                        return
                    log(f"{task.label}: cannot continue from {stable}: {reason}")
        except (LockHeld, FileNotFoundError) as error:  # it is removed meanwhile
            log(f"{task.label}: does not continue from a checkpoint of {stage_dir.path.name}: {error}")
        refused = True
    if refused:
        log(f"{task.label}: trains from step 0 instead")


@contextlib.contextmanager
def _kept(stage_dir: StageDir) -> Iterator[None]:
    """Hold the stage's lock, or, if it is complete, go without: whoever holds it, such as an upload, changes nothing.
    Raises `LockHeld`."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(hold(stage_dir.path))
        except LockHeld:
            if not stage_dir.is_complete:
                raise
        yield


def _link(stable: StableCheckpoint, task: StageTask) -> None:
    """Link the checkpoint into `task`'s directory, after the files that go with it: if interrupted, it is redone."""
    source, directory = stable.stage_dir, task.directory
    final = directory / CHECKPOINTS / stable.path.name
    temporary = final.with_name(final.name + TEMPORARY_SUFFIX)
    shared = shared_identity(source.record)
    assert shared is not None
    with disk_errors(directory):
        shutil.rmtree(temporary, ignore_errors=True)
        if (source.path / METRICS).exists():  # the trainer drops the records of later steps
            copy_file(source.path / METRICS, directory / METRICS)
        link_files(stable.path, temporary)
    write_json(
        directory / EXTENDED_FROM,
        {
            "directory": source.path.name, "fingerprint": source.fingerprint, "step": stable.step,
            "checkpoint": stable.path.name, "shared_fingerprint": shared.fingerprint,
        },
    )  # fmt: skip
    rename_durably(temporary, final)


def link_files(source: Path, target: Path) -> None:
    """Link the files of a checkpoint into the new directory `target`, durably. Raises OSError, `DiskError`."""
    target.mkdir(parents=True)
    for file in source.iterdir():
        if not hard_link(file, target / file.name):
            copy_file(file, target / file.name)
    fsync_directory(target)


def copy_file(source: Path, target: Path) -> str:
    """Copy a file durably; returns its sha256. Raises OSError, `DiskError`."""
    with source.open("rb") as file, durable_file(target) as copy:
        shutil.copyfileobj(file, copy, 1 << 20)
    return copy.sha256
