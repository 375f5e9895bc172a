"""One stage, one runner: the advisory lock on a stage directory. Imports neither torch nor luigi."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from trainer.errors import LockHeld
from trainer.files import disk_errors, read_json, utc_now

LOCK = "lock"
#: What a scheduler has been asked to run for the stage (`pipeline.launchers`); gone when its end has been seen.
JOB = "job.json"
#: Seconds in which the children of a killed process are surely dead.
_DYING_S = 10.0
#: Seconds in which somebody who only looks whether the lock is held has surely let go of it.
_GLANCE_S = 0.2


@contextlib.contextmanager
def hold(directory: Path, *, knows_jobs: bool = False) -> Iterator[int]:
    """Hold the stage directory's lock, a file descriptor; raises `LockHeld` with the holder, `DiskError`.

    A job on other machines may be at work here although nobody waits for it. Only who `knows_jobs`, and looks after
    one, gets the lock then.

    The lock belongs to the open file: it is free again when this process, and every child that was given the
    descriptor, is gone, however they went. The file itself stays.
    """
    with disk_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        fd = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _lock(fd, directory)
        record = {"host": socket.gethostname(), "pid": os.getpid(), "started": utc_now()}
        with disk_errors(directory / LOCK):
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps(record).encode(), 0)
        job = None if knows_jobs else read_json(directory / JOB)
        if job is not None:
            raise LockHeld(
                f"{directory} is being made by {job.get('launcher')} job {job.get('id') or job.get('name')}, as far as "
                f"is known; `luigi` waits for it, `python -m pipeline cancel` ends it"
            )
        yield fd
    finally:
        os.close(fd)


def is_held(directory: Path) -> bool:
    """Whether somebody holds the stage directory's lock."""
    try:
        fd = os.open(directory / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        # Shared, so that two who look do not see each other.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def is_alive(pid: object) -> bool:
    """Whether process `pid` of this machine runs. One that has ended and whose parent has not noticed does not."""
    import psutil  # only where somebody holds a lock

    try:
        return isinstance(pid, int) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _lock(fd: int, directory: Path) -> None:
    """Take the lock, or raise `LockHeld`. Who only looks whether it is held is waited for, and so are the children of
    a holder that was killed, while they die."""
    began = time.monotonic()
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = read_json(directory / LOCK) or {}
        here = holder.get("host") == socket.gethostname()
        dead = not holder or (here and not is_alive(holder.get("pid")))
        if time.monotonic() - began < (_DYING_S if dead else _GLANCE_S):
            time.sleep(0.02)
            continue
        raise LockHeld(
            f"{directory} is being made by process {holder.get('pid', '?')} on {holder.get('host', '?')}, "
            f"started {holder.get('started', '?')}; wait for it, or stop it first"
        )
