"""Download one version of an object in parallel ranges with bounded retries; a kill loses about a second of work.

WORK/download.part holds the bytes at their offsets, WORK/download.json the completed ranges and the object's version.
Once a second the bytes are fsynced and then the state, so the state never claims bytes that are not on disk.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from common.errors import UserError
from common.files import disk_errors, failpoint
from stages.directory.manifest import StageDirectory
from stages.directory.progress import Progress
from stages.transfer.partial import PART, Span, State, joined
from stages.transfer.remote import LeastRate, Remote, Transient

#: Consecutive failures before a range fails, and the first backoff in seconds; each further backoff doubles, ±25 %.
TRIES = 7
BACKOFF_S = 0.5
#: Upper limit on a server's Retry-After, in seconds.
RETRY_AFTER_MAX_S = 120.0
#: A failed attempt that received at least this many bytes resets the failure count.
WORTH_BYTES = 256 << 10
#: Bytes per request.
_RANGE_MIN_BYTES, _RANGE_MAX_BYTES = 1 << 20, 16 << 20
_SAVE_INTERVAL_S = 1.0
#: Minimum interval between two retry notes, in seconds.
_TROUBLE_INTERVAL_S = 10.0


class _Stopped(Exception):
    """Another thread has failed, or the user interrupted."""


class _TooSlow(Transient):
    """A connection below the minimum rate."""


@dataclass
class _Range:
    """A range that one connection fetches; bytes before `at` are written."""

    start: int
    stop: int
    at: int
    tries: Tries
    #: The thread that fetches it, and how many were abandoned before.
    thread: threading.Thread | None = None
    turn: int = 0
    #: Offset where this attempt began; offset and time where its rate measurement began (None: no request is open).
    began: int = 0
    measured_from: int = 0
    measured_since: float | None = None

    def begin(self) -> None:
        self.began = self.measured_from = self.at
        self.measured_since = time.monotonic()

    def too_slow(self, least: LeastRate) -> _TooSlow | None:
        """An error if the rate over the last `least.time_s` seconds is too low; call it at least that often."""
        now, since = time.monotonic(), self.measured_since
        if not least.bytes_per_s or since is None or now - since < least.time_s:
            return None
        came, seconds = self.at - self.measured_from, now - since
        if came < least.bytes_per_s * seconds:
            return _TooSlow(f"it sent {came:,} bytes in {seconds:.0f} s, less than {least.bytes_per_s:g} bytes/s")
        self.measured_from, self.measured_since = self.at, now
        return None


class Transfer:
    """Worker threads that fetch the missing ranges, and the loop that supervises them."""

    def __init__(
        self, remote: Remote, work: StageDirectory, state: State, connections: int, least_rate: LeastRate
    ) -> None:
        self._remote, self._work, self._state, self._least_rate = remote, work, state, least_rate
        self._connections = connections if state.version.resumable else 1
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._ranges = [
            _Range(start, stop, start, Tries(remote.url, self._stop, self._note))
            for start, stop in _cut(state, connections)
        ]
        self._queue = deque(self._ranges)
        self._threads: list[threading.Thread] = []
        self._error: BaseException | None = None
        self._trouble: str | None = None
        self._trouble_said = float("-inf")

    def run(self) -> None:
        """Fetch all missing bytes. Raises `Changed`, `UserError`; bytes already fetched are kept."""
        part = self._work.path / PART
        with disk_errors(part):
            self._fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            with disk_errors(part):
                os.ftruncate(self._fd, self._state.version.length)
            length, done = self._state.version.length, self._state.bytes
            with self._work.progress("download", length, "B", done=done) as bar:
                for _ in range(self._connections):
                    self._start()
                try:
                    self._watch(bar, done)
                finally:
                    with self._lock:  # nothing is written after this
                        self._stop.set()
                    self._save()
        finally:
            os.close(self._fd)
        if self._error is not None:
            raise self._error

    def _start(self, piece: _Range | None = None, error: Transient | None = None) -> None:
        """Start another connection; with `piece`, it takes over a range whose connection was dropped for `error`."""
        # Daemon threads: a stalled read must not block process exit.
        thread = threading.Thread(target=self._serve, args=(piece, error), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _watch(self, bar: Progress, shown: int) -> None:
        saved = time.monotonic()
        while not self._stop.is_set() and (alive := [thread for thread in self._threads if thread.is_alive()]):
            alive[0].join(0.1)
            self._give_up_slow_ones()
            fetched = self._bytes()
            bar.update(fetched - shown)
            shown = fetched
            if time.monotonic() - saved >= _SAVE_INTERVAL_S:
                self._save()
                saved = time.monotonic()
            if self._trouble is not None and time.monotonic() - self._trouble_said >= _TROUBLE_INTERVAL_S:
                self._trouble_said, line, self._trouble = time.monotonic(), self._trouble, None
                bar.note(line)
        bar.update(self._bytes() - shown)

    def _give_up_slow_ones(self) -> None:
        """Abandon connections that are too slow: their threads may block in a read forever and must not write again."""
        for piece in self._ranges:
            with self._lock:
                error = piece.too_slow(self._least_rate) if piece.at < piece.stop else None
                if error is None:
                    continue
                assert piece.thread is not None
                self._threads.remove(piece.thread)
                piece.turn, piece.measured_since = piece.turn + 1, None
            self._start(piece, error)

    def _bytes(self) -> int:
        return self._state.bytes + sum(piece.at - piece.start for piece in self._ranges)

    def _save(self) -> None:
        """Make the fetched bytes durable, then the state that lists them."""
        with self._lock:
            spans = [*self._state.have, *((piece.start, piece.at) for piece in self._ranges)]
        with disk_errors(self._work.path / PART):
            os.fsync(self._fd)
        failpoint("download-save")
        State(self._state.url, self._state.version, joined(spans)).write(self._work.path)

    def _serve(self, piece: _Range | None, error: Transient | None) -> None:
        """A connection's loop: fetch one range after another."""
        try:
            if piece is not None and error is not None:
                self._failed(piece, error)
            while not self._stop.is_set():
                if piece is None:
                    try:
                        piece = self._queue.popleft()
                    except IndexError:
                        return
                self._fetch(piece)
                piece = None
        except _Stopped:
            pass
        except BaseException as error:  # raised again by `run`
            with self._lock:
                self._error = self._error or error
                self._stop.set()

    def _fetch(self, piece: _Range) -> None:
        with self._lock:
            piece.thread, turn = threading.current_thread(), piece.turn
        while piece.at < piece.stop:
            try:
                with self._lock:
                    piece.begin()
                with contextlib.closing(self._remote.read(self._state.version, piece.at, piece.stop)) as chunks:
                    for data in chunks:
                        self._write(piece, turn, data)
                if piece.at < piece.stop:
                    raise Transient(f"the connection ended {piece.stop - piece.at:,} bytes too early")
            except Exception as error:
                with self._lock:
                    if piece.turn != turn:  # abandoned; another thread has taken over
                        raise _Stopped from error
                    piece.measured_since = None
                if not isinstance(error, Transient):
                    raise
                self._failed(piece, error)
        failpoint(f"download-range:{piece.start}")

    def _failed(self, piece: _Range, error: Transient) -> None:
        """Back off; raises `UserError` if the range has failed too often."""
        # Bytes that came too slowly do not count as progress, or this could go on forever.
        came = (piece.measured_from if isinstance(error, _TooSlow) else piece.at) - piece.began
        if not self._state.version.resumable:
            with self._lock:
                piece.at, came = piece.start, 0
        piece.tries.failed(error, worth=came >= WORTH_BYTES)

    def _write(self, piece: _Range, turn: int, data: bytes) -> None:
        if len(data) > piece.stop - piece.at:
            raise Transient(f"the server sent more than the {piece.stop - piece.start:,} bytes asked for")
        with self._lock:
            if self._stop.is_set() or piece.turn != turn:
                raise _Stopped
            with disk_errors(self._work.path / PART):
                left = memoryview(data)
                while left:
                    written = os.pwrite(self._fd, left, piece.at)
                    left, piece.at = left[written:], piece.at + written

    def _note(self, line: str) -> None:
        self._trouble = line


class Tries:
    """Consecutive failures of one range, with exponential backoff."""

    def __init__(self, url: str, stop: threading.Event, note: Callable[[str], None]) -> None:
        self._url, self._stop, self._note = url, stop, note
        self._failed = 0

    def failed(self, error: Transient, *, worth: bool = False) -> None:
        """Back off; raises `UserError` after `TRIES` failures. `worth`: the attempt made progress, so the count
        restarts at 1."""
        self._failed = 1 if worth else self._failed + 1
        if self._failed >= TRIES:
            raise UserError(
                f"{self._url}: {error}, {TRIES} times in a row; check network and server, then run the same "
                f"again: it resumes from the bytes that are there"
            )
        wait_s = BACKOFF_S * 2 ** (self._failed - 1) * random.uniform(0.75, 1.25)  # jitter against retries in step
        if error.retry_after_s is not None:
            wait_s = max(wait_s, min(error.retry_after_s, RETRY_AFTER_MAX_S))
        self._note(f"{self._url}: {error}; trying again in {wait_s:.1f} s (failure {self._failed} of {TRIES})")
        if self._stop.wait(wait_s):
            raise _Stopped


def _cut(state: State, connections: int) -> Iterator[Span]:
    """Split the missing bytes into ranges small enough that all connections stay busy to the end."""
    length = state.version.length
    size = min(max(length // (2 * connections), _RANGE_MIN_BYTES), _RANGE_MAX_BYTES)
    if not state.version.resumable:
        size = length
    edges = [0, *(edge for span in state.have for edge in span), length]
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        for at in range(start, stop, size):
            yield at, min(at + size, stop)
