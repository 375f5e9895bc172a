"""A store in a folder, which several machines may share (NFS)."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import os
import socket
import time
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import BinaryIO

from common.errors import UserError
from common.files import TEMPORARY_SUFFIX, disk_errors, failpoint, fsync_directory
from stages.store.backend import Altered, Conflict, Entry, Missing, Report
from stages.store.digest import copy_hashed
from stages.store.options import StoreOptions
from stages.store.records import PREFIXES

#: Ends the names of lock files, which stay. They are not listed.
_LOCK = ".lock"
#: The folder of the locks of single keys. Several keys may share one, so that their number is limited.
_LOCKS = "locks"
#: Seconds for which a lock is waited for. It is held while a record is compared and renamed.
_WAIT_S = 60.0


class FolderBackend:
    def __init__(self, options: StoreOptions) -> None:
        self.url, self.connections = options.place, options.connections
        self.root = Path(self.url)

    def read(self, key: str) -> tuple[bytes, str]:
        with _readable(self.root / key):
            data = (self.root / key).read_bytes()
        return data, _version(data)

    def write(self, key: str, data: bytes, *, replaces: str | None) -> str:
        path = self.root / key
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        with _new_file(path, self._unchanged(key, replaces)) as file:
            file.write(data)
        return _version(data)

    @contextlib.contextmanager
    def _unchanged(self, key: str, version: str | None) -> Iterator[None]:
        """Exclude other writers of the key. Raises `Conflict` unless it holds this version; `UserError`."""
        # Earlier versions lock the whole folder: they exclude us, and we them.
        folder = (self.root / key).with_name(_LOCK)
        own = self.root / _LOCKS / f"{_version(key.encode())[:3]}{_LOCK}"
        with _locked(folder, fcntl.LOCK_SH), _locked(own, fcntl.LOCK_EX):
            try:
                before: str | None = self.read(key)[1]
            except Missing:
                before = None
            if before != version:
                raise Conflict(key)
            yield

    def delete(self, keys: Collection[str]) -> None:
        for key in keys:
            with disk_errors(self.root / key):
                (self.root / key).unlink(missing_ok=True)

    def list(self, prefix: str) -> Iterator[Entry]:
        # Only the directory that the prefix names is read.
        folder = prefix.rpartition("/")[0]
        for parent, _, names in os.walk(self.root / folder, onerror=_refuse):
            for name in names:
                path = Path(parent) / name
                key = path.relative_to(self.root).as_posix()
                if name.endswith((_LOCK, TEMPORARY_SUFFIX)) or not key.startswith(prefix):
                    continue
                with contextlib.suppress(Missing), _readable(path):  # deleted meanwhile
                    stat = path.stat()
                    yield Entry(key, stat.st_size, stat.st_mtime)

    def present(self, keys: Collection[str]) -> dict[str, int]:
        found = {}
        for key in keys:
            with contextlib.suppress(Missing), _readable(self.root / key):
                found[key] = (self.root / key).stat().st_size
        return found

    def upload(self, key: str, path: Path, size: int, sha256: str, report: Report) -> None:
        final = self.root / key
        with disk_errors(final):
            final.parent.mkdir(parents=True, exist_ok=True)
        with path.open("rb", buffering=0) as source, _new_file(final, contextlib.nullcontext()) as copy:
            _copy(source, copy, key, size, sha256, report)

    def download(self, key: str, path: Path, size: int, sha256: str, report: Report) -> None:
        with _readable(self.root / key):
            source = (self.root / key).open("rb", buffering=0)
        try:
            with source, disk_errors(path), path.open("xb") as copy:
                _copy(source, copy, key, size, sha256, report)
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def sweep(self, before: float) -> int:
        swept = 0
        walks = (os.walk(self.root / prefix, onerror=_refuse) for prefix in PREFIXES)
        for parent, _, names in itertools.chain.from_iterable(walks):
            for path in (Path(parent) / name for name in names if name.endswith(TEMPORARY_SUFFIX)):
                with contextlib.suppress(Missing), _readable(path):
                    is_left = path.stat().st_mtime < before
                    swept += is_left
                    if is_left:
                        path.unlink(missing_ok=True)
        return swept


def _copy(source: BinaryIO, copy: BinaryIO, key: str, size: int, sha256: str, report: Report) -> None:
    if copy_hashed(source, copy, size, report) != (size, sha256):
        raise Altered(key)


@contextlib.contextmanager
def _new_file(final: Path, alone: contextlib.AbstractContextManager[None]) -> Iterator[BinaryIO]:
    """A file that appears under its name whole and durable, or not at all; any number of writers may do so at once.
    `alone`: entered while it gets the name."""
    temporary = final.with_name(f"{final.name}.{uuid.uuid4().hex}{TEMPORARY_SUFFIX}")
    try:
        with disk_errors(final), temporary.open("xb") as raw:
            yield raw
            raw.flush()
            os.fsync(raw.fileno())
        with alone, disk_errors(final):
            failpoint(f"store-rename:{final.name}")
            os.replace(temporary, final)
        fsync_directory(final.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    """Hold the lock file `path`, `how`: fcntl.LOCK_SH or LOCK_EX. The system frees that of a killed process. Raises
    `UserError` if another process has it for `_WAIT_S`, for example because it was suspended."""
    until = time.monotonic() + _WAIT_S
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        with disk_errors(path):
            while not _lock(fd, how):
                if time.monotonic() > until:
                    who = os.pread(fd, 300, 0).decode(errors="replace") or "another process"
                    raise UserError(
                        f"{path} has been locked for {_WAIT_S:g} s by {who}, which may be suspended; let it go on, or "
                        f"end it, then run the same again"
                    )
                time.sleep(0.02)
            if how == fcntl.LOCK_EX:
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        os.close(fd)


def _lock(fd: int, how: int) -> bool:
    """Take the lock unless another process has it; returns whether it was taken. Raises OSError."""
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise Missing(str(path)) from None
    except OSError as error:
        raise UserError(f"the store's {path} cannot be read: {error.strerror}; check its permissions") from error


def _refuse(error: OSError) -> None:
    """For os.walk, which otherwise skips what it cannot read."""
    with contextlib.suppress(Missing), _readable(Path(error.filename)):
        raise error


def _version(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
