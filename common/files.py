"""Files that survive a crash: write to a temporary name, fsync, rename, fsync the directory.

Everything that this project calls finished goes through here, so a reader sees a file whole or not at all.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from common.errors import DiskError

#: Files with this suffix are unfinished; whoever holds their directory's lock may remove them.
TEMPORARY_SUFFIX = ".tmp"
#: Suffix of a directory while another takes its name, on file systems that cannot exchange names.
_REPLACED_SUFFIX = ".replaced"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h
#: How far a running stage or training is, for programs: rewritten continually, removed at the end.
PROGRESS = "progress.json"
#: Touched while a stage's processes compute, removed at the end.
ALIVE = "alive"
#: A training's record of its steps, one JSON object per line.
METRICS = "metrics.jsonl"
#: A file of this name in a training's directory asks for a checkpoint at the end of the step; it is then removed.
SAVE_REQUEST = "save_now"
#: Writes of 64 KiB to 1 MiB are equally fast (docs/decisions.md).
_CHUNK_BYTES = 256 << 10
_UTC_FORMAT = "%Y-%m-%dT%H:%M:%SZ"
#: Bytes written between two requests to start write-back.
_FLUSH_INTERVAL_BYTES = 64 << 20


def failpoint(name: str, damage: Callable[[], None] | None = None) -> None:
    """Do nothing, unless a recovery test has set the environment variable FAILPOINT to `name` (see `_fail`)."""
    if "FAILPOINT" in os.environ:
        _fail(name, damage)


def _fail(name: str, damage: Callable[[], None] | None) -> None:
    """FAILPOINT_LOG: a file that collects the names passed. FAILPOINT_TOKEN: a file that is removed when the point is
    reached; once it is gone, nothing happens there, so the point acts once. FAILPOINT_ACTION: kill (the default),
    terminate, stop, raise, `wait SECONDS`, or damage: whatever damage to the state the point offers. FAILPOINT_PAUSE:
    seconds that each micro-step takes longer, for a training that runs until it is stopped."""
    if name.startswith("micro-step:"):
        time.sleep(float(os.environ.get("FAILPOINT_PAUSE", 0)))
    if log := os.environ.get("FAILPOINT_LOG"):
        with open(log, "a", encoding="utf-8") as file:
            file.write(name + "\n")
    if os.environ["FAILPOINT"] != name:
        return
    if token := os.environ.get("FAILPOINT_TOKEN"):
        try:
            os.unlink(token)
        except FileNotFoundError:
            return
    action = os.environ.get("FAILPOINT_ACTION", "kill")
    if action.startswith("wait "):
        return time.sleep(float(action.removeprefix("wait ")))
    if action == "damage":
        assert damage is not None, f"failpoint {name} damages nothing"
        return damage()
    if action == "raise":
        raise RuntimeError(f"failpoint {name}")
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "stop": signal.SIGSTOP}[action])


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a `DiskError` that names `path` and the free space."""
    try:
        yield
    except OSError as error:
        raise DiskError.of(error, path) from error


def fsync_directory(path: Path) -> None:
    """Make the names in directory `path` durable; raises `DiskError`."""
    with disk_errors(path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def fresh_directory(path: Path, *, parents: bool = False) -> None:
    """Make an empty directory, without what a killed attempt has left there. Raises OSError."""
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=parents)


def rename_durably(temporary: Path, final: Path) -> None:
    """Give `temporary` (already fsynced) its final name and make that durable; raises `DiskError`.

    Whatever had the name is replaced in one step, even a directory: whenever the process dies, one of the two is there.
    """
    failpoint(f"rename-before:{final.name}")
    with disk_errors(final):
        replaces = temporary.is_dir() and final.exists()
        if replaces:
            _exchange(temporary, final)
        else:
            os.replace(temporary, final)
        failpoint(f"rename-after:{final.name}")
        fsync_directory(final.parent)
        if replaces:  # it is durable; what a reader on NFS still has open stays until the next sweep
            shutil.rmtree(temporary, ignore_errors=True)


def _exchange(temporary: Path, final: Path) -> None:
    """Have two directories exchange their names; raises OSError.

    In one step where the file system supports it (not NFS). Elsewhere the old one has the suffix `.replaced` for a
    moment, from which `sweep_temporaries` restores it.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is not None:
        if rename(_AT_FDCWD, os.fsencode(temporary), _AT_FDCWD, os.fsencode(final), _RENAME_EXCHANGE) == 0:
            return
        number = ctypes.get_errno()
        if number not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise OSError(number, os.strerror(number), str(final))
    replaced = replaced_name(final)
    final.rename(replaced)
    failpoint(f"rename-between:{final.name}")
    temporary.rename(final)
    failpoint(f"rename-replaced:{final.name}")
    replaced.rename(temporary)


def replaced_name(final: Path) -> Path:
    """What the directory `final` is called between the two renames of `_exchange`."""
    return final.with_name(final.name + _REPLACED_SUFFIX)


def restore_replaced(final: Path) -> None:
    """Restore the directory that a process killed in `_exchange` has left without its name. Raises OSError."""
    replaced = replaced_name(final)
    if replaced.exists() and not final.exists():
        replaced.rename(final)


@contextlib.contextmanager
def durable_file(path: Path) -> Iterator[HashingFile]:
    """Open `path` for writing so that it appears complete and durable, or not at all; raises `DiskError`."""
    with replaced_durably(path) as temporary, temporary.open("wb") as raw:
        failpoint(f"write-before:{path.name}")
        yield HashingFile(raw)
        raw.flush()
        os.fsync(raw.fileno())


@contextlib.contextmanager
def replaced_durably(path: Path) -> Iterator[Path]:
    """Yield a temporary name, whose file the block creates and fsyncs; it is renamed to `path` if the block succeeds.

    Raises `DiskError`.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        with disk_errors(path):
            yield temporary
            failpoint(f"write-after:{path.name}")
        rename_durably(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


class HashingFile:
    """A binary file that keeps the length and sha256 of what was written, so that it need not be read again."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._digest = hashlib.sha256()
        self.bytes = self._flushed = 0

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B") if isinstance(data, memoryview) else memoryview(data)
        for start in range(0, len(view), _CHUNK_BYTES):
            chunk = view[start : start + _CHUNK_BYTES]
            self._raw.write(chunk)
            self._digest.update(chunk)
        self.bytes += len(view)
        if self.bytes - self._flushed >= _FLUSH_INTERVAL_BYTES:
            # Starts write-back while the next bytes are produced, which leaves less for fsync.
            if hasattr(os, "posix_fadvise"):  # not on macOS
                os.posix_fadvise(self._raw.fileno(), self._flushed, self.bytes - self._flushed, os.POSIX_FADV_DONTNEED)
            self._flushed = self.bytes

    @property
    def sha256(self) -> str:
        """Of everything written so far, in hex."""
        return self._digest.hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, durably; raises `DiskError`."""
    with durable_file(path) as file:
        file.write((json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def hard_link(source: Path, target: Path) -> bool:
    """Make `target` a hard link to `source`; returns whether the file system allows it. Raises FileNotFoundError."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        return False
    return True


def replace_text(path: Path, text: str) -> None:
    """Write `text` so that readers see the old or the new, never a part; not durable. Raises OSError."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def replace_json(path: Path, value: Any) -> None:
    """Write `value` as JSON as `replace_text` does. Raises OSError."""
    replace_text(path, json.dumps(value))


def read_json(path: Path, *, damaged: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is no such file; `damaged` if what is there is not a JSON object."""
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (IsADirectoryError, ValueError, RecursionError):
        return damaged
    return value if isinstance(value, dict) else damaged


def has_types(value: Any, types: Mapping[str, Any]) -> bool:
    """Whether it is an object of JSON in which each of these names is there, with this type or one of these."""
    return isinstance(value, dict) and all(isinstance(value.get(name), kind) for name, kind in types.items())


def utc(seconds: float) -> str:
    """`2026-11-21T03:04:05Z` for seconds since 1970."""
    return datetime.fromtimestamp(seconds, UTC).strftime(_UTC_FORMAT)


def parse_utc(text: str) -> datetime:
    """The time that `utc` wrote. Raises ValueError."""
    return datetime.strptime(text, _UTC_FORMAT).replace(tzinfo=UTC)


def local_time(text: str) -> str:
    """The time that `utc` wrote in this machine's time zone, to the minute. Raises ValueError."""
    return parse_utc(text).astimezone().strftime("%Y-%m-%d %H:%M")


def utc_now() -> str:
    return utc(time.time())


def sha256_of(path: Path) -> str:
    """The sha256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sweep_temporaries(directory: Path) -> list[str]:
    """Remove what dead runs left unfinished directly in `directory`; returns the names of what is gone. What a reader
    on NFS has open stays in its directory until a later sweep. The caller holds its lock."""
    swept = []
    for path in list(directory.iterdir()):
        if path.name.endswith(_REPLACED_SUFFIX):
            final = path.with_name(path.name.removesuffix(_REPLACED_SUFFIX))
            restore_replaced(final)
            if path.exists():
                path.rename(path.with_name(final.name + TEMPORARY_SUFFIX))
    for path in directory.iterdir():
        if path.name.endswith(TEMPORARY_SUFFIX):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
            swept += [] if path.exists() else [path.name]
    return sorted(swept)
