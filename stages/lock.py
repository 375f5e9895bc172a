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
#: Seconds in which the children of a killed process are surely dead.
_DYING_S = 10.0
#: Seconds in which somebody who only looks whether the lock is held has surely let go of it.
_GLANCE_S = 0.2


@contextlib.contextmanager
def hold(directory: Path) -> Iterator[int]:
    """Hold the stage directory's lock, a file descriptor; raises `LockHeld` with the holder, `DiskError`.

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
        yield fd
    finally:
        os.close(fd)


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
        dead = not holder or (here and not Path(f"/proc/{holder.get('pid')}").exists())
        if time.monotonic() - began < (_DYING_S if dead else _GLANCE_S):
            time.sleep(0.02)
            continue
        raise LockHeld(
            f"{directory} is being made by process {holder.get('pid', '?')} on {holder.get('host', '?')}, "
            f"started {holder.get('started', '?')}; wait for it, or stop it first"
        )
