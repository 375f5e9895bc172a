"""An advisory lock that lets one process at a time work on a directory. Imports no torch."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from common.console import log
from common.errors import DiskError, LockHeld
from common.files import disk_errors, read_json, utc_now
from common.process import SAVING_S

LOCK = "lock"
#: The file with the name under which a stage's maker holds its lease in a shared store (`stages.store.lease`).
HOLDER = "lease.json"
#: The identity of a stage directory's result; the lock's holder writes it.
IDENTITY = "stage.json"
#: Environment variable: a process that holds a directory's lock passes the directory's fingerprint to the commands that
#: it starts there.
HELD_FINGERPRINT_VARIABLE = "STAGE_FINGERPRINT"
#: Seconds to wait for the children of a killed holder to save and exit, and until a line says so.
_DYING_S, _QUIET_S = SAVING_S + 5, 1.0
#: The longest that a process which only checks the lock may hold it, in seconds.
_GLANCE_S = 0.2


@contextlib.contextmanager
def hold(directory: Path) -> Iterator[int]:
    """Hold the lock of `directory`; yields its file descriptor.

    Raises `LockHeld`, which names the holder, or `DiskError`.

    The lock belongs to the open file: it is released when this process and every child that inherited the descriptor
    have exited, for whatever reason. The file itself stays, unless its holder removes the directory.
    """
    fd = _open_and_lock(directory)
    try:
        record = {"host": socket.gethostname(), "pid": os.getpid(), "started": utc_now()}
        with disk_errors(directory / LOCK):
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps(record).encode(), 0)
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def exclusively(path: Path) -> Iterator[None]:
    """Wait for the lock file `path`, which stays, and hold it. The system frees that of a killed process. Raises
    `DiskError`."""
    with disk_errors(path):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        with disk_errors(path):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def is_held_for_us(directory: Path) -> bool:
    """Whether the parent process holds the lock of `directory` on behalf of this one."""
    fingerprint = os.environ.get(HELD_FINGERPRINT_VARIABLE)
    return fingerprint is not None and (read_json(directory / IDENTITY) or {}).get("fingerprint") == fingerprint


def is_held(directory: Path) -> bool:
    """Whether any process holds the lock of `directory`."""
    try:
        fd = os.open(directory / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        # A shared lock, so that two processes that check at the same time do not block each other.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def is_alive(pid: object) -> bool:
    """Whether process `pid` runs on this machine; a zombie does not."""
    import psutil  # slow to import, and only needed when a lock is held

    try:
        return isinstance(pid, int) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _open_and_lock(directory: Path) -> int:
    """The descriptor of the lock that is held. If the holder that it waited for has removed the directory, it is made
    anew."""
    while True:
        with disk_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
            fd = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _lock(fd, directory)
            with contextlib.suppress(OSError):  # it is gone, or was removed on another machine (ESTALE)
                if os.path.samestat(os.fstat(fd), os.stat(directory / LOCK)):
                    return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _lock(fd: int, directory: Path) -> None:
    """Take the lock, or raise `LockHeld`. Waits for processes that only check it, and for the children of a killed
    holder to exit."""
    began, is_said = time.monotonic(), False
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = read_json(directory / LOCK) or {}
        except OSError as error:
            raise DiskError.of(error, directory / LOCK) from error
        here = holder.get("host") == socket.gethostname()
        dead = not holder or (here and not is_alive(holder.get("pid")))
        waited = time.monotonic() - began
        if waited < (_DYING_S if dead else _GLANCE_S):
            if waited > _QUIET_S and not is_said:
                is_said = True
                log(f"{directory}: children of a killed process are still saving; waiting for them")
            time.sleep(0.02)
            continue
        raise LockHeld(
            f"{directory} is being made by process {holder.get('pid', '?')} on {holder.get('host', '?')}, "
            f"started {holder.get('started', '?')}; wait for it, or stop it first"
        )
