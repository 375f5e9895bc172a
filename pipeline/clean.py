"""`python -m pipeline clean`: the stage directories that nothing needs any more and the checkpoints that trainings have
set aside, their sizes, and their removal."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.differences import first_difference
from pipeline.everything import everything
from pipeline.goal import Goal, chain
from pipeline.launchers import find_job
from pipeline.shelf import Place, Shelf, abandoned_checkpoints, holder, size_bytes
from pipeline.stage import Stage
from stages.lock import LOCK
from stages.manifest import IDENTITY, MANIFEST
from stages.view.text import size
from trainer.errors import LockHeld, UserError

SUMMARY = "what is superseded, its size and why; removes it only with --remove"


@dataclass(frozen=True)
class Plan:
    """Which stage directories can go, which stay, and why."""

    superseded: list[tuple[Place, str]]
    #: Those that the present settings have no use for and that stay all the same.
    kept: list[tuple[Place, str]]
    #: Checkpoints that trainings which stay have set aside.
    abandoned: list[tuple[Place, Path]]


def plan(goal: Goal) -> Plan:
    """Superseded is what neither the present settings nor a link in `latest/` nor a running stage needs.

    Raises `UserError` when the identity of a stage cannot be computed, because then nobody knows what is needed.
    """
    tasks = chain(goal)
    shelf = Shelf(tasks[0].settings.work_dir)
    current = {task.identity.fingerprint: task for task in tasks}
    linked = shelf.linked()
    reasons: dict[str, str] = {}
    for place in shelf.places:
        who = holder(place.path)
        if place.fingerprint in current:
            reasons[place.fingerprint] = "the present settings"
        elif place.path.resolve() in linked:
            reasons[place.fingerprint] = f"latest/{place.label} points to it"
        elif who is not None:
            reasons[place.fingerprint] = f"in use by {who}"
    needed = [(up, p.path.name) for p in shelf.places if p.fingerprint in reasons for up in _upstream(p)]
    while needed:
        fingerprint, by = needed.pop()
        if fingerprint not in reasons:
            reasons[fingerprint] = f"{by} is made from it"
            found = shelf.of_fingerprint(fingerprint)
            needed += [(up, found.path.name) for up in _upstream(found)] if found is not None else []
    by_label = {task.label: task for task in tasks}
    superseded = [(p, _why(p, by_label.get(p.label))) for p in shelf.places if p.fingerprint not in reasons]
    kept = [(p, reasons[p.fingerprint]) for p in shelf.places if p.fingerprint in reasons.keys() - current.keys()]
    abandoned = [(p, path) for p in shelf.places if p.fingerprint in reasons for path in abandoned_checkpoints(p.path)]
    return Plan(superseded, kept, abandoned)


def _upstream(place: Place) -> list[str]:
    return [str(fingerprint) for fingerprint in place.record.get("upstream", {}).values()]


def _why(place: Place, task: Stage | None) -> str:
    if task is None:
        return "no stage of the present settings"
    state = "" if place.is_complete else "unfinished, "
    return f"{state}made with other settings ({first_difference(place.record, task.identity.record())})"


def remove(place: Place, shelf_dir: Path) -> None:
    """Remove a stage directory under its lock. Raises `LockHeld`, `UserError`.

    manifest.json goes first and stage.json last: a removal that is cut short leaves an unfinished stage, which the
    next one finds again.
    """
    with _locked(place):
        if place.path.resolve() in Shelf(shelf_dir).linked():
            raise LockHeld(f"{place.path} has become the latest of its stage meanwhile; it stays")
        order = {MANIFEST: 0, LOCK: 2, IDENTITY: 3}
        for path in sorted(place.path.iterdir(), key=lambda path: order.get(path.name, 1)):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        place.path.rmdir()


def remove_abandoned(place: Place, path: Path) -> None:
    """Remove checkpoints that the training in `place` has set aside, under its lock. Raises `LockHeld`, `UserError`."""
    with _locked(place):
        shutil.rmtree(path)


@contextlib.contextmanager
def _locked(place: Place) -> Iterator[None]:
    """Hold the lock of a stage directory that no job is at work in. Raises `LockHeld`; `UserError` for an OSError."""
    try:
        fd = os.open(place.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if (job := find_job(place.path)) is not None and job.is_alive():
                raise LockHeld(f"{place.path} is in use now by {job}; it stays")
            yield
        finally:
            os.close(fd)
    except BlockingIOError:
        raise LockHeld(f"{place.path} is in use now; it stays") from None
    except OSError as error:
        raise UserError(
            f"cannot remove {error.filename or place.path}: {error.strerror}; check its permissions"
        ) from error


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--remove", action="store_true", help="remove what is listed")


def run(args: argparse.Namespace) -> int:
    """List what is superseded, and remove it if told to; 1 if something could not be removed."""
    found = plan(everything())
    for place, reason in found.kept:
        print(f"kept        {place.path}: {reason}")
    total, failed = 0, 0
    removals: list[tuple[str, Path, str, Callable[[], None]]] = [
        ("superseded", place.path, reason, functools.partial(remove, place, place.path.parent))
        for place, reason in found.superseded
    ]
    removals += [
        (
            "set aside ",
            path,
            "checkpoints that training went on without",
            functools.partial(remove_abandoned, place, path),
        )
        for place, path in found.abandoned
    ]
    for what, path, reason, remove_it in removals:
        freed = size_bytes(path)
        done = what
        if args.remove:
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
    elif args.remove:
        print(f"freed {size(total)}")
    else:
        count = "1 directory" if len(removals) == 1 else f"{len(removals)} directories"
        print(f"{size(total)} in {count}; nothing was removed: --remove does that")
    return 1 if failed else 0
