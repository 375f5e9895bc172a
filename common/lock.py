"""One directory, one process at work on it: an advisory lock in a file of the directory. Imports no torch."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from common.errors import DiskError, LockHeld
from common.files import disk_errors, read_json, utc_now

LOCK = "lock"
#: The identity of what is made in a stage's directory, written by whoever holds its lock.
IDENTITY = "stage.json"
#: Set by a process that holds the lock of a directory, for the commands it starts to work there: the fingerprint in
#: the directory's identity.
HELD_FINGERPRINT_VARIABLE = "STAGE_FINGERPRINT"
#: Grace period for the children of a killed holder, in seconds.
_DYING_S = 10.0
#: Longest time that somebody who only looks whether the lock is held keeps it, in seconds.
_GLANCE_S = 0.2


@contextlib.contextmanager
def hold(directory: Path) -> Iterator[int]:
    """Hold the lock of `directory`, a file descriptor; raises `LockHeld` with the holder, `DiskError`.

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


def is_held_for_us(directory: Path) -> bool:
    """Whether the process that started this one holds the lock of `directory` for it."""
    fingerprint = os.environ.get(HELD_FINGERPRINT_VARIABLE)
    return fingerprint is not None and (read_json(directory / IDENTITY) or {}).get("fingerprint") == fingerprint


def is_held(directory: Path) -> bool:
    """Whether somebody holds the lock of `directory`."""
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
        except OSError as error:
            raise DiskError.of(error, directory / LOCK) from error
        here = holder.get("host") == socket.gethostname()
        dead = not holder or (here and not is_alive(holder.get("pid")))
        if time.monotonic() - began < (_DYING_S if dead else _GLANCE_S):
            time.sleep(0.02)
            continue
        raise LockHeld(
            f"{directory} is being made by process {holder.get('pid', '?')} on {holder.get('host', '?')}, "
            f"started {holder.get('started', '?')}; wait for it, or stop it first"
        )
