"""The sha256 of input files, cached between commands, and checks that a file read is still the file that was hashed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from common.errors import UserError
from common.files import read_json, replace_json

#: The cache, in the work directory: {absolute path: "sha256 state"}. One string per file is read three times as fast as
#: a list, which matters with 100,000 files.
INPUT_HASHES = "inputs.json"
#: A file that changed this recently may change again within the same time stamp, so its sha256 is not cached. The
#: resolution is up to 2 s on FAT and up to 10 ms on Linux's own file systems.
_SETTLED_NS = 2_000_000_000
#: Seconds between writes of the cache while hashing, and before a line says what takes so long.
_SAVE_INTERVAL_S, _NOTE_AFTER_S = 20.0, 5.0
_THREADS = min(8, os.cpu_count() or 1)
_BLOCK_BYTES = 1 << 20
_TRIES = 3


def _state(stat: os.stat_result) -> str:
    """A text that changes with any change to a file, even if its size and modification time are restored."""
    return f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}"


def _has_settled(stat: os.stat_result) -> bool:
    return abs(time.time_ns() - max(stat.st_mtime_ns, stat.st_ctime_ns)) > _SETTLED_NS


class InputFile(NamedTuple):
    """A hashed file, with its size and its state when it was hashed."""

    path: str
    sha256: str
    bytes: int
    state: str

    @property
    def modified_s(self) -> float:
        """Unix time at which it was changed last."""
        return int(self.state.split()[1]) / 1e9

    def require_unchanged(self, fd: int | None = None) -> None:
        """Raise `UserError` unless the file (or the one open as `fd`) is in the state in which it was hashed."""
        with readable(self.path):
            stat = os.stat(self.path) if fd is None else os.fstat(fd)
        if _state(stat) != self.state:
            raise changed(self.path)


@contextlib.contextmanager
def readable(path: object) -> Iterator[None]:
    """`UserError` if the block cannot read the file `path`."""
    try:
        yield
    except OSError as error:
        raise _cannot_read(path, error) from error


def changed(path: object) -> UserError:
    return UserError(
        f"{path} was changed while it was in use; earlier results are kept: run the same command again to use the "
        f"file as it is now"
    )


class InputHashes:
    """The sha256 of files, by path and state; the JSON file `cache` keeps them for later commands."""

    def __init__(self, cache: Path | None = None) -> None:
        self._path = cache
        self._known: dict[str, str] | None = None

    @classmethod
    def beside(cls, stage_directory: Path) -> InputHashes:
        """With the cache of the work directory, if the stage directory is in one."""
        cache = stage_directory.parent / INPUT_HASHES
        return cls(cache if cache.exists() else None)

    def hash(self, paths: Iterable[str | Path]) -> list[InputFile]:
        """The sha256 of all files, in order.

        Raises `UserError` if a file cannot be read, or changes while it is read.
        """
        known, found, missing = self._load(), list[InputFile](), list[int]()
        names, name = list(map(str, paths)), ""
        try:  # one for all files: a context manager for each takes as long as `stat`
            for name in names:
                stat = os.stat(name)
                state = _state(stat)
                entry = known.get(_key(name), "")
                if entry[65:] != state:
                    missing.append(len(found))
                found.append(InputFile(name, entry[:64], stat.st_size, state))
        except OSError as error:
            raise _cannot_read(name, error) from error
        for at, file in zip(missing, self._hashed([names[at] for at in missing]), strict=True):
            found[at] = file
        return found

    def sha256(self, path: str | Path) -> str:
        """The sha256 of one file, in hex."""
        return self.hash([path])[0].sha256

    def _hashed(self, paths: Sequence[str]) -> Iterator[InputFile]:
        """Read and cache these files."""
        if not paths:
            return
        began = saved = time.monotonic()
        noted = False
        try:
            with ThreadPoolExecutor(_THREADS) as threads:
                try:
                    for done, (file, settled) in enumerate(threads.map(_hash_file, paths), 1):
                        if settled:
                            self._load()[_key(file.path)] = f"{file.sha256} {file.state}"
                        yield file
                        now = time.monotonic()
                        if not noted and now - began > _NOTE_AFTER_S:
                            noted = True
                            print(f"note: reading {len(paths):,} input files once ({done:,} done)", file=sys.stderr)
                        if now - saved > _SAVE_INTERVAL_S:
                            self._save()
                            saved = time.monotonic()
                except BaseException:
                    threads.shutdown(cancel_futures=True)
                    raise
        finally:
            self._save()

    def _load(self) -> dict[str, str]:
        if self._known is None:
            self._known = _read(self._path) if self._path is not None else {}
        return self._known

    def _save(self) -> None:
        """Best effort: several processes may write the cache; without it files are read again."""
        if self._path is None:
            return
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_json(self._path, {**_read(self._path), **self._load()})


def digest(identities: Iterable[str]) -> str:
    """One identity for several, in order: a single one itself, else a sha256."""
    every = list(identities)
    if len(every) == 1:
        return every[0]
    return "sha256:" + hashlib.sha256(json.dumps(every).encode()).hexdigest()


def _key(name: str) -> str:
    return name if name.startswith("/") else os.path.abspath(name)


def _cannot_read(path: object, error: OSError) -> UserError:
    return UserError(f"cannot read {path}: {error.strerror}; check the path and its permissions")


def _read(path: Path) -> dict[str, str]:
    """The cache; entries of any other format, older ones included, are ignored."""
    return {key: entry for key, entry in (read_json(path) or {}).items() if isinstance(entry, str)}


def _hash_file(path: str) -> tuple[InputFile, bool]:
    """The file, and whether its state may be cached."""
    for _ in range(_TRIES):
        with readable(path), open(path, "rb", buffering=0) as file:
            before = os.fstat(file.fileno())
            sha256, buffer = hashlib.sha256(), bytearray(min(_BLOCK_BYTES, before.st_size + 1))
            while count := file.readinto(buffer):
                sha256.update(memoryview(buffer)[:count])
            if _state(os.fstat(file.fileno())) == _state(before):
                return InputFile(path, sha256.hexdigest(), before.st_size, _state(before)), _has_settled(before)
    raise UserError(f"{path} is being written: it changed {_TRIES} times while it was read; wait until it is complete")
