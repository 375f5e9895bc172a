"""The sha256 of a large file, computed during its transfer: one core hashes no faster than a disk writes."""

from __future__ import annotations

import hashlib
import heapq
import itertools
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from common.errors import UserError
from stages.store.backend import Report

_BUFFER_BYTES, _BUFFERS = 1 << 20, 8
#: Bytes written between two requests to start write-back, which leaves less for fsync.
_FLUSH_BYTES = 32 << 20


def copy_hashed(source: BinaryIO, target: BinaryIO, most: int, report: Report) -> tuple[int, str]:
    """Copy `source` durably to its end, or until more than `most` bytes are read; returns their number and sha256.

    Raises `UserError` if `source` cannot be read, OSError if `target` cannot be written: they may be on two disks.
    """
    buffers = [bytearray(min(most + 1, _BUFFER_BYTES)) for _ in range(_BUFFERS if most > _BUFFER_BYTES else 1)]
    hashed: list[Future[None] | None] = [None] * len(buffers)
    digest, size, flushed = hashlib.sha256(), 0, 0
    with ThreadPoolExecutor(1) as thread:
        for turn in itertools.cycle(range(len(buffers))):
            if (before := hashed[turn]) is not None:
                before.result()
            data = memoryview(buffers[turn])[: _read(source, buffers[turn])]
            if not data:
                break
            if len(buffers) > 1:
                hashed[turn] = thread.submit(digest.update, data)
            else:
                digest.update(data)
            target.write(data)
            size += len(data)
            report(len(data))
            if size > most:
                break
            if size - flushed >= _FLUSH_BYTES and hasattr(os, "posix_fadvise"):  # not on macOS
                os.posix_fadvise(target.fileno(), flushed, size - flushed, os.POSIX_FADV_DONTNEED)
                flushed = size
        target.flush()
        os.fsync(target.fileno())
    return size, digest.hexdigest()


def _read(source: BinaryIO, buffer: bytearray) -> int:
    try:
        count: int = source.readinto(buffer)  # type: ignore[attr-defined]
    except OSError as error:
        raise UserError(
            f"cannot read {source.name}: {error.strerror}; check the disk or network it is on, then run the same again"
        ) from error
    return count


class HashBehind:
    """Hashes a file while its pieces are written in any order. A context manager, whose thread ends with the block."""

    def __init__(self, path: Path, size: int) -> None:
        self._path, self._size = path, size
        self._digest = hashlib.sha256()
        #: Pieces that are written, but do not yet adjoin the bytes before `_written`.
        self._apart: list[tuple[int, int]] = []
        self._written, self._is_over = 0, False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def wrote(self, start: int, stop: int) -> None:
        """Note that bytes [start, stop) are in the file."""
        with self._changed:
            heapq.heappush(self._apart, (start, stop))
            while self._apart and self._apart[0][0] == self._written:
                self._written = heapq.heappop(self._apart)[1]
            if self._thread is None and self._written < self._size:
                self._thread = threading.Thread(target=self._run)
                self._thread.start()
            self._changed.notify()

    def sha256(self) -> str:
        """The sha256 of the whole file, all of which must be written. Raises OSError."""
        if self._thread is None:
            self._run()
        else:
            self._thread.join()
        if self._error is not None:
            raise self._error
        return self._digest.hexdigest()

    def _run(self) -> None:
        buffer, at = memoryview(bytearray(min(self._size, _BUFFER_BYTES))), 0
        try:
            with self._path.open("rb", buffering=0) as file:
                while at < self._size:
                    with self._changed:
                        while self._written == at and not self._is_over:
                            self._changed.wait()
                        stop = self._written
                    while at < stop and (count := file.readinto(buffer[: stop - at])):
                        self._digest.update(buffer[:count])
                        at += count
                    if at < stop or self._is_over:  # it was cut off, or not all of it arrived
                        return
        except OSError as error:
            self._error = error
