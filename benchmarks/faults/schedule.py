"""The faults that hit a training run in `faults.goodput`, and what each leaves of it."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from benchmarks.faults.training import Training

#: Ends a fault that lasts.
Undo = Callable[[], None]
Fault = Callable[[Training, random.Random], Undo]
_BALLAST = "ballast"
#: Size of the file system that is filled: several checkpoints of the model that is trained.
_DISK_MIB = 2048


def kill(training: Training, rng: random.Random) -> Undo:
    """SIGKILL of a process: a worker, what started it, or the command itself."""
    victims = training.processes()
    if victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            rng.choice(victims).kill()
    return _nothing


def stop(training: Training, rng: random.Random) -> Undo:
    """SIGSTOP of a process, and SIGCONT later."""
    victims = training.processes()
    if not victims:
        return _nothing
    victim = rng.choice(victims)

    def undo() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.send_signal(signal.SIGCONT)

    with contextlib.suppress(psutil.NoSuchProcess):
        victim.send_signal(signal.SIGSTOP)
    return undo


def full_disk(training: Training, rng: random.Random) -> Undo:
    """The run's file system is full for a while."""
    ballast = training.disk.parent / _BALLAST
    with ballast.open("wb") as file:
        free = os.statvfs(training.disk.parent)
        os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize)
    return lambda: ballast.unlink()


def lost_machine(training: Training, rng: random.Random) -> Undo:
    """All processes die at once; the next machine has the disk."""
    training.end()
    return _nothing


def lost_disk(training: Training, rng: random.Random) -> Undo:
    """All processes die at once, and what they have written is lost; ours has a store."""
    training.end()
    shutil.rmtree(training.disk, ignore_errors=True)
    return _nothing


FAULTS: dict[str, Fault] = {
    "kill": kill, "stop": stop, "full-disk": full_disk, "lost-machine": lost_machine, "lost-disk": lost_disk,
}  # fmt: skip


@contextlib.contextmanager
def disk_for(directory: Path, *, is_filled: bool) -> Iterator[Path]:
    """A folder in `directory`, on a file system of its own if that is to be filled."""
    place = directory / "disk"
    place.mkdir()
    try:
        if is_filled:
            mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_MIB}m", "tmpfs", str(place)]
            mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
            if mounted.returncode:
                sys.exit(f"error: full-disk fills a file system of its own, and none can be mounted: {mounted.stderr}")
        yield place
    finally:
        if place.is_mount():
            subprocess.run(["umount", "-l", place], check=True)
        shutil.rmtree(place, ignore_errors=True)


def _nothing() -> None:
    return
