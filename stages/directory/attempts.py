"""When a stage ran, how it ended and why it failed: attempts.jsonl in its directory, from which a view draws the
timeline.

    {"started": 1763740800.1, "host": "node-3", "pid": 4711, "seen": 1763737200.0}     its command starts
    {"ended": 1763740923.4, "how": "interrupted", "status": 75, "error": ""}           its command has ended
    {"ended": 1763740923.5, "how": "failed", "is_final": true, "error": "…"}           it is not started again
    {"waited": "downloading", "began": 1763740700.1, "until": 1763740799.8}            before the next start

Times are seconds since 1970. A process that is killed leaves no second line; `seen` in the next start then gives the
time of its last sign of life. Imports neither torch nor luigi.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from common.errors import DiskError
from common.files import ALIVE, METRICS, PROGRESS, disk_errors, failpoint

ATTEMPTS = "attempts.jsonl"
#: hung: killed after the hang timeout. killed: gone without a record, with the process that started it.
How = Literal["complete", "interrupted", "failed", "hung", "killed", "running"]
#: What a stage may wait for before its command starts.
Wait = Literal["waiting in a queue", "downloading"]
_SIGNS_OF_LIFE = ("stage.log", PROGRESS, ALIVE, METRICS)
_ERROR_CHARACTERS = 500


@dataclass(frozen=True)
class Attempt:
    """One start of a stage's command; times in seconds since 1970."""

    started: float
    #: For a killed attempt, its last sign of life; for a running one, now.
    ended: float
    how: How
    #: The last line of the error that it failed with.
    error: str = ""
    host: str = ""
    #: The waits before it: (one of `Wait`, began, ended).
    waits: tuple[tuple[str, float, float], ...] = ()

    @property
    def seconds(self) -> float:
        return self.ended - self.started


@dataclass(frozen=True)
class Failure:
    """Why a stage failed."""

    #: For a traceback, its last line.
    line: str
    #: Seconds since 1970.
    at: float


@contextlib.contextmanager
def recording(directory: Path) -> Iterator[Callable[[How, int, str], None]]:
    """Record the block as an attempt; it passes how it ended (how, exit status, error) to the yielded function.
    An exception is recorded as a failure. Raises `DiskError` if the start cannot be written."""
    said: list[tuple[How, int | None, str]] = []
    start: dict[str, Any] = {"started": time.time(), "host": socket.gethostname(), "pid": os.getpid()}
    if (directory / ATTEMPTS).exists():
        start["seen"] = last_sign_of_life(directory)
    _append(directory, start)
    try:
        yield lambda how, status, error: said.append((how, status, error))
    except Exception as error:
        said.append(("failed", None, str(error)))
        raise
    finally:
        how, status, text = said[-1] if said else ("interrupted", None, "")
        _append_end(directory, how, "" if how == "complete" else text, status=status)


def record_wait(directory: Path, what: Wait, began: float) -> None:
    """Record that the stage has waited until now, since `began` (seconds since 1970). Raises `DiskError`."""
    _append(directory, {"waited": what, "began": began, "until": time.time()})


def record_failure(directory: Path, error: str) -> None:
    """Record that a run of the stage has failed for good."""
    _append_end(directory, "failed", error, is_final=True)


def failures(directory: Path) -> frozenset[float]:
    """When runs of the stage failed for good, in seconds since 1970."""
    return frozenset(record["ended"] for record in _records(directory / ATTEMPTS) if record.get("is_final") is True)


def last_failure(directory: Path) -> Failure | None:
    """The failure that ended the last run or attempt, or None."""
    last = next(iter(deque((one for one in _records(directory / ATTEMPTS) if "waited" not in one), maxlen=1)), {})
    if last.get("how") not in ("failed", "hung"):
        return None
    return Failure(_last_line(last) or "no message", last["ended"])


def read(directory: Path, *, running: bool, complete: bool) -> list[Attempt]:
    """The attempts at the stage in `directory`, oldest first. `running`, `complete`: its state now."""
    found: list[Attempt] = []
    open_start: dict[str, Any] | None = None
    waits: list[tuple[str, float, float]] = []
    for record in _records(directory / ATTEMPTS):
        if "waited" in record:
            waits.append((record["waited"], record["began"], record["until"]))
        elif "started" in record:
            record["waits"], waits = tuple(waits), []
            if open_start is not None:
                found.append(_attempt(open_start, {"ended": record.get("seen"), "how": "killed"}))
            open_start = record
        elif open_start is not None:
            found.append(_attempt(open_start, record))
            open_start = None
    if open_start is not None:
        how, ended = "killed", last_sign_of_life(directory)
        if running:
            how, ended = "running", time.time()
        elif complete:  # its last line is missing (full disk, killed before it); the manifest may not be there yet
            how = "complete"
            with contextlib.suppress(FileNotFoundError):
                ended = (directory / "manifest.json").stat().st_mtime
        found.append(_attempt(open_start, {"ended": ended, "how": how}))
    return found


def _attempt(start: dict[str, Any], end: dict[str, Any]) -> Attempt:
    started = float(start["started"])
    ended = max(started, float(end.get("ended") or 0))
    return Attempt(started, ended, end["how"], _last_line(end), str(start.get("host", "")), start["waits"])


def _last_line(end: dict[str, Any]) -> str:
    return "".join(str(end.get("error") or "").strip().splitlines()[-1:])


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """The valid lines; a power failure may leave invalid ones."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict) and (_is_start(record) or _is_end(record) or _is_wait(record)):
                yield record


def _is_start(record: dict[str, Any]) -> bool:
    return _is_time(record.get("started")) and _is_time(record.get("seen", 0))


def _is_end(record: dict[str, Any]) -> bool:
    return "started" not in record and record.get("how") in get_args(How) and _is_time(record.get("ended"))


def _is_wait(record: dict[str, Any]) -> bool:
    return record.get("waited") in get_args(Wait) and _is_time(record.get("began")) and _is_time(record.get("until"))


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value < 1e11


def _append_end(directory: Path, how: How, error: str, **facts: Any) -> None:
    # Best effort: a full disk may be what the stage failed with, and that error must not be replaced.
    with contextlib.suppress(DiskError):
        _append(directory, {"ended": time.time(), "how": how, **facts, "error": error[-_ERROR_CHARACTERS:]})


def _append(directory: Path, record: dict[str, Any]) -> None:
    path = directory / ATTEMPTS
    failpoint(f"append-before:{path.name}")
    with disk_errors(path), path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":  # a full disk or a power failure has cut the last line short
                file.write(b"\n")
        file.write(f"{json.dumps(record)}\n".encode())
    failpoint(f"append-after:{path.name}")


def last_sign_of_life(directory: Path) -> float:
    """When the stage in `directory` last showed a sign of life, in seconds since 1970; 0: never."""
    times = [0.0]
    for name in _SIGNS_OF_LIFE:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            times.append((directory / name).stat().st_mtime)
    return max(times)
