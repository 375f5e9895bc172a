"""The bytes of one version of an object: parallel ranges, bounded retries, and a kill loses about a second of them.

WORK/download.part holds the bytes in their places, WORK/download.json which of them are there and of which version of
the object. Once a second the bytes are made durable and then the record, so that it never claims too much.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from stages.manifest import StageDirectory
from stages.progress import Progress
from stages.remote import Remote, Transient, Version
from trainer.errors import UserError
from trainer.files import disk_errors, failpoint, read_json, write_json

PART = "download.part"
STATE = "download.json"

#: Failures in a row after which a range is given up, and the seconds waited after the first; each wait is twice the
#: one before, give or take a quarter.
TRIES = 7
BACKOFF_S = 0.5
#: Longest wait for a server that names one.
RETRY_AFTER_MAX_S = 120.0
#: A failed try that brought so many bytes is not counted.
WORTH_BYTES = 256 << 10
#: Bytes asked for in one request.
_RANGE_MIN_BYTES, _RANGE_MAX_BYTES = 1 << 20, 16 << 20
_SAVE_INTERVAL_S = 1.0
#: Seconds between two lines about trouble.
_TROUBLE_INTERVAL_S = 10.0

Span = tuple[int, int]


@dataclass(frozen=True)
class State:
    """What download.json says."""

    url: str
    version: Version
    #: What is there: ascending ranges [start, stop).
    have: list[Span]
    #: Whether what came of it was refused, so that the object is looked at again before it is used again.
    refused: bool = False

    @classmethod
    def read(cls, directory: Path) -> State | None:
        record = read_json(directory / STATE)
        if record is None:
            return None
        have = [(int(start), int(stop)) for start, stop in record["have"]]
        return cls(record["url"], Version(**record["version"]), have, record["refused"])

    def write(self, directory: Path) -> None:
        """Durably; raises `DiskError`."""
        write_json(directory / STATE, asdict(self))

    @property
    def bytes(self) -> int:
        return sum(stop - start for start, stop in self.have)


class _Stopped(Exception):
    """Another thread has failed, or the person has had enough."""


@dataclass
class _Range:
    """A range that one connection fetches: bytes up to `at` are there."""

    start: int
    stop: int
    at: int


class Transfer:
    """The threads that fetch what is missing, and the one that waits for them."""

    def __init__(self, remote: Remote, work: StageDirectory, state: State, connections: int) -> None:
        self._remote, self._work, self._state = remote, work, state
        self._ranges = list(_cut(state, connections))
        self._queue = deque(self._ranges)
        self._connections = connections if state.version.resumable else 1
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._trouble: str | None = None
        self._trouble_said = float("-inf")

    def run(self) -> None:
        """Fetch it all. Raises `Changed`, `UserError`; what is there by then is kept."""
        part = self._work.path / PART
        with disk_errors(part):
            self._fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            with disk_errors(part):
                os.ftruncate(self._fd, self._state.version.length)
            # Daemons: a stalled one must not keep a process that is to end.
            threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(self._connections)]
            length, done = self._state.version.length, self._state.bytes
            with self._work.progress("download", length, "B", done=done) as bar:
                for thread in threads:
                    thread.start()
                try:
                    self._watch(threads, bar, done)
                finally:
                    with self._lock:  # nothing is written after this
                        self._stop.set()
                    self._save()
        finally:
            os.close(self._fd)
        if self._error is not None:
            raise self._error

    def _watch(self, threads: list[threading.Thread], bar: Progress, shown: int) -> None:
        saved = time.monotonic()
        while any(thread.is_alive() for thread in threads) and not self._stop.is_set():
            next(thread for thread in threads if thread.is_alive() or thread is threads[-1]).join(0.1)
            there = self._bytes()
            bar.update(there - shown)
            shown = there
            if time.monotonic() - saved >= _SAVE_INTERVAL_S:
                self._save()
                saved = time.monotonic()
            if self._trouble is not None and time.monotonic() - self._trouble_said >= _TROUBLE_INTERVAL_S:
                self._trouble_said, line, self._trouble = time.monotonic(), self._trouble, None
                bar.note(line)
        bar.update(self._bytes() - shown)

    def _bytes(self) -> int:
        return self._state.bytes + sum(piece.at - piece.start for piece in self._ranges)

    def _save(self) -> None:
        """Make what is there durable, and the record of it."""
        with self._lock:
            spans = [*self._state.have, *((piece.start, piece.at) for piece in self._ranges)]
        with disk_errors(self._work.path / PART):
            os.fsync(self._fd)
        failpoint("download-save")
        State(self._state.url, self._state.version, _joined(spans)).write(self._work.path)

    def _serve(self) -> None:
        """A connection: one range after the other."""
        try:
            while not self._stop.is_set():
                try:
                    piece = self._queue.popleft()
                except IndexError:
                    return
                self._fetch(piece)
        except _Stopped:
            pass
        except BaseException as error:  # raised again by `run`
            with self._lock:
                self._error = self._error or error
                self._stop.set()

    def _fetch(self, piece: _Range) -> None:
        tries = Tries(self._remote.url, self._stop, self._note)
        while piece.at < piece.stop:
            began = piece.at
            try:
                with contextlib.closing(self._remote.read(self._state.version, piece.at, piece.stop)) as chunks:
                    for data in chunks:
                        self._write(piece, data)
                if piece.at < piece.stop:
                    raise Transient(f"the connection ended {piece.stop - piece.at:,} bytes too early")
            except Transient as error:
                came = piece.at - began
                if not self._state.version.resumable:
                    with self._lock:
                        piece.at, came = piece.start, 0
                tries.failed(error, worth=came >= WORTH_BYTES)
        failpoint(f"download-range:{piece.start}")

    def _write(self, piece: _Range, data: bytes) -> None:
        if len(data) > piece.stop - piece.at:
            raise Transient(f"the server sent more than the {piece.stop - piece.start:,} bytes asked for")
        with self._lock:
            if self._stop.is_set():
                raise _Stopped
            with disk_errors(self._work.path / PART):
                left = memoryview(data)
                while left:
                    written = os.pwrite(self._fd, left, piece.at)
                    left, piece.at = left[written:], piece.at + written

    def _note(self, line: str) -> None:
        self._trouble = line


class Tries:
    """Counts the failures of one range in a row, and waits after each, longer and longer."""

    def __init__(self, url: str, stop: threading.Event, note: Callable[[str], None]) -> None:
        self._url, self._stop, self._note = url, stop, note
        self._failed = 0

    def failed(self, error: Transient, *, worth: bool = False) -> None:
        """Wait, or raise `UserError` after `TRIES`. `worth`: the try has brought enough not to be counted."""
        self._failed = 1 if worth else self._failed + 1
        if self._failed >= TRIES:
            raise UserError(
                f"{self._url}: {error}, and so {TRIES} times in a row; check network and server, then run the same "
                f"again: it goes on from the bytes that are there"
            )
        wait_s = BACKOFF_S * 2 ** (self._failed - 1) * random.uniform(0.75, 1.25)  # so that not all come at once
        if error.retry_after_s is not None:
            wait_s = max(wait_s, min(error.retry_after_s, RETRY_AFTER_MAX_S))
        self._note(f"{self._url}: {error}; trying again in {wait_s:.1f} s (failure {self._failed} of {TRIES})")
        if self._stop.wait(wait_s):
            raise _Stopped


def _cut(state: State, connections: int) -> Iterator[_Range]:
    """What is missing, in ranges: small enough that every connection has some, the last bytes too."""
    length = state.version.length
    size = min(max(length // (2 * connections), _RANGE_MIN_BYTES), _RANGE_MAX_BYTES)
    if not state.version.resumable:
        size = length
    edges = [0, *(edge for span in state.have for edge in span), length]
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        for at in range(start, stop, size):
            yield _Range(at, min(at + size, stop), at)


def _joined(spans: list[Span]) -> list[Span]:
    """The same bytes in as few ascending ranges as can be."""
    joined: list[Span] = []
    for start, stop in sorted(span for span in spans if span[0] < span[1]):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined
