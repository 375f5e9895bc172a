"""`python -m pipeline clean`: lists or removes superseded stage directories, and checkpoints set aside."""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import functools
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from common.errors import LockHeld, UserError
from common.files import ALIVE, PROGRESS, TEMPORARY_SUFFIX
from common.lock import HOLDER
from pipeline.launchers import find_job, jobs
from pipeline.status.chain import StageTask, chain, is_complete
from pipeline.status.differences import first_difference
from pipeline.status.extension import stable_checkpoints
from pipeline.status.stage_dirs import (
    StageDir,
    StageDirs,
    abandoned_checkpoints,
    holder,
    last_checkpoint_step,
    size_bytes,
)
from pipeline.tasks.everything import Everything
from pipeline.tasks.goal import Goal
from pipeline.tasks.sweep import stages_of_sweeps
from stages.directory.attempts import ATTEMPTS
from stages.directory.damaged import DAMAGED
from stages.directory.lock import JOB, LOCK
from stages.directory.manifest import IDENTITY, MANIFEST
from stages.view.text import size
from trainer.checkpoint.directory import CHECKPOINTS

#: Marks a stage directory whose removal has begun: the rest of it cannot be resumed.
_REMOVAL = f"removal{TEMPORARY_SUFFIX}"
_TRAININGS = ("pretrain", "train_mlp")
#: Files of stage directories that are not results.
_RECORDS = (
    *(LOCK, HOLDER, IDENTITY, MANIFEST, DAMAGED, ATTEMPTS, PROGRESS, ALIVE, "config.json", "settings.json"),
    *(JOB, jobs.STATE, jobs.SCRIPT, jobs.OBJECTS),
)
SUMMARY = "list what is superseded, with size and reason; removes it only with --remove"


@dataclass(frozen=True)
class Plan:
    """Which stage directories can be removed, which are kept, and why."""

    superseded: list[tuple[StageDir, str]]
    #: Kept although the present settings do not need them.
    kept: list[tuple[StageDir, str]]
    #: Unfinished, with work that could be resumed: removed only if a person names them.
    interrupted: list[tuple[StageDir, str]]
    #: Checkpoints set aside by training runs that are kept.
    abandoned: list[tuple[StageDir, Path]]


def plan(goal: Goal, named: Collection[str]) -> Plan:
    """Superseded are directories that are needed neither by the present settings, nor by a link in `latest/`, nor by a
    running or interrupted stage; and interrupted ones that are `named`.

    Raises `UserError` when the identity or the record of a stage cannot be read, because it is then unknown what is
    needed.
    """
    tasks = chain(goal)
    stage_dirs = StageDirs(tasks[0].settings.work_dir)
    if stage_dirs.unreadable:
        raise UserError(
            f"{stage_dirs.unreadable[0]} cannot be read, so it is not known what it needs; clean as a user who may "
            f"read it"
        )
    current = {task.identity.fingerprint: task for task in tasks}
    linked = stage_dirs.linked()
    reasons, interrupted = dict[str, str](), dict[str, str]()
    swept = stages_of_sweeps(stage_dirs.work_dir)
    for stage_dir in stage_dirs.all:
        who = holder(stage_dir.path)
        if stage_dir.fingerprint in current:
            reasons[stage_dir.fingerprint] = "the present settings"
        elif stage_dir.path.resolve() in linked:
            reasons[stage_dir.fingerprint] = f"latest/{stage_dir.label} points to it"
        elif who is not None:
            reasons[stage_dir.fingerprint] = f"in use by {who}"
        elif stage_dir.fingerprint in swept and stage_dir.path.name not in named:
            reasons[stage_dir.fingerprint] = f"sweep {swept[stage_dir.fingerprint]}"
        elif stage_dir.path.name not in named and (progress := _unfinished_work(stage_dir)) is not None:
            reasons[stage_dir.fingerprint] = interrupted[stage_dir.fingerprint] = progress
    reasons |= _extended(tasks, stage_dirs)
    needed = [(up, p.path.name) for p in stage_dirs.all if p.fingerprint in reasons for up in _upstream(p)]
    while needed:
        fingerprint, by = needed.pop()
        if fingerprint not in reasons:
            reasons[fingerprint] = f"{by} is made from it"
            found = stage_dirs.of_fingerprint(fingerprint)
            needed += [(up, found.path.name) for up in _upstream(found)] if found is not None else []
    by_label = {task.label: task for task in tasks}
    superseded = [(p, _why(p, by_label.get(p.label))) for p in stage_dirs.all if p.fingerprint not in reasons]
    stays = reasons.keys() - current.keys() - interrupted.keys()
    kept = [(p, reasons[p.fingerprint]) for p in stage_dirs.all if p.fingerprint in stays]
    unfinished = [(p, interrupted[p.fingerprint]) for p in stage_dirs.all if p.fingerprint in interrupted]
    abandoned = [
        (p, path) for p in stage_dirs.all if p.fingerprint in reasons for path in abandoned_checkpoints(p.path)
    ]
    return Plan(superseded, kept, unfinished, abandoned)


def _extended(tasks: Iterable[StageTask], stage_dirs: StageDirs) -> dict[str, str]:
    """Directories that training runs of the present settings would continue, by fingerprint, and why they are kept."""
    return {
        stable.stage_dir.fingerprint: f"{task.label} would continue from its step {stable.step:,}"
        for task in tasks
        if not is_complete(task)
        for stable in stable_checkpoints(task, stage_dirs)
    }


def _unfinished_work(stage_dir: StageDir) -> str | None:
    """What an unfinished stage would resume from, in a few words; None: it is finished, or has no results yet."""
    if stage_dir.is_complete or (stage_dir.path / _REMOVAL).exists():
        return None
    step = last_checkpoint_step(stage_dir.path)
    if step is not None:
        return f"interrupted at step {step}"
    checkpoints = stage_dir.path / CHECKPOINTS
    if checkpoints.is_dir():
        return "interrupted, with checkpoints, none of them intact" if any(checkpoints.iterdir()) else None
    if stage_dir.label.startswith(_TRAININGS):
        return None
    made = [
        path for path in stage_dir.path.iterdir() if path.name not in _RECORDS and path.suffix not in (".log", ".tmp")
    ]
    return "interrupted, with some of its results" if made else None


def _upstream(stage_dir: StageDir) -> list[str]:
    return [str(fingerprint) for fingerprint in stage_dir.record.get("upstream", {}).values()]


def _why(stage_dir: StageDir, task: StageTask | None) -> str:
    if task is None:
        return "not a stage of the present settings"
    state = "" if stage_dir.is_complete else "unfinished, "
    return f"{state}made with other settings ({first_difference(stage_dir.record, task.identity.record())})"


def remove(stage_dir: StageDir, work_dir: Path) -> None:
    """Remove a stage directory under its lock. Raises `LockHeld`, `UserError`.

    manifest.json goes first and stage.json last: a removal that is cut short leaves an unfinished stage, which the
    next removal finds again.
    """
    with _locked(stage_dir):
        if stage_dir.path.resolve() in StageDirs(work_dir).linked():
            raise LockHeld(f"{stage_dir.path} is now the latest of its stage; it is kept")
        (stage_dir.path / _REMOVAL).touch()
        order = {MANIFEST: 0, LOCK: 2, _REMOVAL: 3, IDENTITY: 4}
        for path in sorted(stage_dir.path.iterdir(), key=lambda path: order.get(path.name, 1)):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    # Not before the lock is closed: NFS keeps the name of an open file that was removed.
    with _removal_errors(stage_dir):
        try:
            stage_dir.path.rmdir()
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:  # another run has begun there
                raise


def remove_abandoned(stage_dir: StageDir, path: Path) -> None:
    """Remove checkpoints that the training in `stage_dir` set aside. Raises `LockHeld`, `UserError`."""
    with _locked(stage_dir):
        shutil.rmtree(path)


@contextlib.contextmanager
def _locked(stage_dir: StageDir) -> Iterator[None]:
    """Hold the lock of a stage directory without a running job. Raises `LockHeld`; `UserError` for an OSError."""
    with _removal_errors(stage_dir):
        fd = os.open(stage_dir.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if (job := find_job(stage_dir.path)) is not None and job.is_alive():
                raise LockHeld(f"{stage_dir.path} is in use now by {job}; it stays")
            yield
        except BlockingIOError:
            raise LockHeld(f"{stage_dir.path} is in use now; it stays") from None
        finally:
            os.close(fd)


@contextlib.contextmanager
def _removal_errors(stage_dir: StageDir) -> Iterator[None]:
    """Raise `UserError` for an OSError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot remove {error.filename or stage_dir.path}: {error.strerror}; check its permissions"
        ) from error


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--remove", nargs="*", metavar="NAME",
        help="remove what is superseded; if stage directories are named, only those, even interrupted ones",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """List what is superseded, and remove it if asked to. Returns 1 if something could not be removed."""
    named = {Path(name).name for name in args.remove or ()}
    found = plan(Everything(), named)
    if unknown := named - {stage_dir.path.name for stage_dir, _ in found.superseded}:
        raise UserError(
            f"{min(unknown)} is neither superseded nor interrupted; `python -m pipeline clean` lists what is"
        )
    for stage_dir, reason in found.kept:
        print(f"kept        {stage_dir.path}: {reason}")
    for stage_dir, reason in found.interrupted:
        held, name = size(size_bytes(stage_dir.path)), stage_dir.path.name
        print(f"interrupted {stage_dir.path}: {held}, {reason}; to remove it: --remove {name}")
    total, failed = 0, 0
    removals: list[tuple[str, Path, str, Callable[[], None]]] = [
        ("superseded", stage_dir.path, reason, functools.partial(remove, stage_dir, stage_dir.path.parent))
        for stage_dir, reason in found.superseded
        if not named or stage_dir.path.name in named
    ]
    removals += [
        (
            "set aside ",
            path,
            "checkpoints that training continued without",
            functools.partial(remove_abandoned, stage_dir, path),
        )
        for stage_dir, path in found.abandoned
        if not named
    ]
    for what, path, reason, remove_it in removals:
        freed = size_bytes(path)
        done = what
        if args.remove is not None:
            try:
                remove_it()
                done = "removed   "
            except UserError as error:
                print(f"kept        {path}: {error}")
                failed += 1
                continue
        total += freed
        print(f"{done}  {path}: {size(freed)}, {reason}")
    if not removals:
        print("nothing is superseded")
    elif args.remove is not None:
        print(f"freed {size(total)}")
    else:
        count = "1 directory" if len(removals) == 1 else f"{len(removals)} directories"
        print(f"{size(total)} in {count}; nothing was removed: --remove does that")
    return 1 if failed else 0
