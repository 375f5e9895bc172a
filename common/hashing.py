"""Input files from outside: their sha256, remembered, and checks that what is read is what was hashed."""

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

#: The sha256 of every input file that was read, in the work directory.
INPUT_HASHES = "inputs.json"
#: A file changed this recently may change again without a new time stamp, so its sha256 is not remembered. File
#: systems keep times in steps of up to 2 s (FAT), Linux's own in steps of up to 10 ms.
_SETTLED_NS = 2_000_000_000
#: Seconds of hashing after which what is known so far is written down, and a line says what takes so long.
_SAVE_INTERVAL_S, _NOTE_AFTER_S = 20.0, 5.0
_THREADS = min(8, os.cpu_count() or 1)
_BLOCK_BYTES = 1 << 20
_TRIES = 3


class FileState(NamedTuple):
    """What changes whenever a file does, even if its size and modification time are put back."""

    bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, stat: os.stat_result) -> FileState:
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)

    def has_settled(self, now_ns: int) -> bool:
        return abs(now_ns - max(self.mtime_ns, self.ctime_ns)) > _SETTLED_NS


class InputFile(NamedTuple):
    """A file that was hashed, and the state in which it was."""

    path: str
    sha256: str
    state: FileState

    def require_unchanged(self, fd: int | None = None) -> None:
        """Raise `UserError` if the file, or the one open as `fd`, is not in the state in which it was hashed."""
        with _readable(self.path):
            stat = os.stat(self.path) if fd is None else os.fstat(fd)
        if FileState.of(stat) != self.state:
            raise changed(self.path)


def changed(path: object) -> UserError:
    return UserError(
        f"{path} was changed while it was in use; what was made from it before is kept: run the same command again, "
        f"which takes the file as it is then"
    )


class InputHashes:
    """The sha256 of files, by path and state; `memory` is a JSON file that keeps them for the next command."""

    def __init__(self, memory: Path | None = None) -> None:
        self._path = memory
        self._known: dict[str, list[object]] | None = None

    @classmethod
    def beside(cls, stage_directory: Path) -> InputHashes:
        """With the memory of the work directory, if the stage directory is in one."""
        memory = stage_directory.parent / INPUT_HASHES
        return cls(memory if memory.exists() else None)

    def hash(self, paths: Iterable[str | Path]) -> list[InputFile]:
        """The sha256 of all files, in order.

        Raises `UserError`: a file cannot be read, or does not stay as it is for as long as reading it takes.
        """
        known, found, missing = self._load(), list[InputFile](), list[int]()
        names = list(map(str, paths))
        for name, stat in zip(names, _stats(names), strict=True):
            state = FileState.of(stat)
            entry = known.get(_key(name))
            if entry is None or entry[1:] != [*state]:
                missing.append(len(found))
                entry = [""]
            found.append(InputFile(name, str(entry[0]), state))
        for at, file in zip(missing, self._hashed([names[at] for at in missing]), strict=True):
            found[at] = file
        return found

    def sha256(self, path: str | Path) -> str:
        """The sha256 of one file, in hex."""
        return self.hash([path])[0].sha256

    def _hashed(self, paths: Sequence[str]) -> Iterator[InputFile]:
        """Read and remember these files."""
        if not paths:
            return
        began = saved = time.monotonic()
        noted = False
        try:
            with ThreadPoolExecutor(_THREADS) as threads:
                try:
                    for done, file in enumerate(threads.map(_hash_file, paths), 1):
                        self._remember(file)
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

    def _load(self) -> dict[str, list[object]]:
        if self._known is None:
            self._known = _read(self._path) if self._path is not None else {}
        return self._known

    def _remember(self, file: InputFile) -> None:
        if file.state.has_settled(time.time_ns()):
            self._load()[_key(file.path)] = [file.sha256, *file.state]

    def _save(self) -> None:
        """Best effort: several processes may write it, and where it cannot be written files are read again."""
        if self._path is None:
            return
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_json(self._path, {**_read(self._path), **self._load()})


def digest(identities: Iterable[str]) -> str:
    """One identity for several, in order: their own if it is one, else a sha256."""
    every = list(identities)
    if len(every) == 1:
        return every[0]
    return "sha256:" + hashlib.sha256(json.dumps(every).encode()).hexdigest()


def _key(name: str) -> str:
    return name if name.startswith("/") else os.path.abspath(name)


def _stats(names: list[str]) -> Iterator[os.stat_result]:
    """One for each file; a context manager for each would take as long as the system does."""
    at = 0
    try:
        for at, name in enumerate(names):  # noqa: B007 (for the message)
            yield os.stat(name)
    except OSError as error:
        raise _cannot_read(names[at], error) from error


def _cannot_read(path: object, error: OSError) -> UserError:
    return UserError(f"cannot read {path}: {error.strerror}; check the path and its permissions")


def _read(path: Path) -> dict[str, list[object]]:
    return {key: entry for key, entry in (read_json(path) or {}).items() if isinstance(entry, list) and len(entry) == 5}


def _hash_file(path: str) -> InputFile:
    for _ in range(_TRIES):
        with _readable(path), open(path, "rb", buffering=0) as file:
            before = FileState.of(os.fstat(file.fileno()))
            sha256, buffer = hashlib.sha256(), bytearray(min(_BLOCK_BYTES, before.bytes + 1))
            while count := file.readinto(buffer):
                sha256.update(memoryview(buffer)[:count])
            if FileState.of(os.fstat(file.fileno())) == before:
                return InputFile(path, sha256.hexdigest(), before)
    raise UserError(f"{path} is being written: it changed {_TRIES} times while it was read; wait until it is whole")


@contextlib.contextmanager
def _readable(path: object) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _cannot_read(path, error) from error
