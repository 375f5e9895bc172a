"""When a stage was at work, and how that ended: attempts.jsonl in its directory, of which a view draws the time line.

    {"started": 1763740800.1, "host": "node-3", "pid": 4711, "seen": 1763737200.0}     when its command is started
    {"ended": 1763740923.4, "how": "interrupted", "status": 75, "error": ""}           when it has ended

Times are seconds since 1970. A process that was killed leaves no second line; then `seen`, when the attempt after it
began, says when something was last heard of it. Imports neither torch nor luigi.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from common.errors import DiskError
from common.files import ALIVE, METRICS, PROGRESS, disk_errors, failpoint

ATTEMPTS = "attempts.jsonl"
#: hung: killed after too long a silence. killed: gone without a word, with the process that started it.
How = Literal["complete", "interrupted", "failed", "hung", "killed", "running"]
_SIGNS_OF_LIFE = ("stage.log", PROGRESS, ALIVE, METRICS)
_ERROR_CHARACTERS = 500


@dataclass(frozen=True)
class Attempt:
    """One run of a stage's command; times in seconds since 1970."""

    started: float
    #: Of one that was killed, when it was last heard of; of one that runs, now.
    ended: float
    how: How
    #: The last line of what it failed with.
    error: str = ""
    host: str = ""

    @property
    def seconds(self) -> float:
        return self.ended - self.started


@contextlib.contextmanager
def recording(directory: Path) -> Iterator[Callable[[How, int, str], None]]:
    """Record an attempt, which is the block; it says how it ended (how, exit status, error) by the function that it is
    given. What the block raises is recorded as a failure. Raises `DiskError` if the start cannot be written."""
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
        shown = "" if how == "complete" else text[-_ERROR_CHARACTERS:]
        # Best effort: the disk may be full, and what is said of that must not be hidden.
        with contextlib.suppress(DiskError):
            _append(directory, {"ended": time.time(), "how": how, "status": status, "error": shown})


def read(directory: Path, *, running: bool, complete: bool) -> list[Attempt]:
    """The attempts at the stage in `directory`, oldest first. `running`, `complete`: its state now."""
    found: list[Attempt] = []
    open_start: dict[str, Any] | None = None
    for record in _records(directory / ATTEMPTS):
        if "started" in record:
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
        elif complete:  # killed between the manifest and the line here
            how, ended = "complete", (directory / "manifest.json").stat().st_mtime
        found.append(_attempt(open_start, {"ended": ended, "how": how}))
    return found


def _attempt(start: dict[str, Any], end: dict[str, Any]) -> Attempt:
    started = float(start["started"])
    lines = str(end.get("error") or "").strip().splitlines()
    ended = max(started, float(end.get("ended") or 0))
    return Attempt(started, ended, end["how"], lines[-1] if lines else "", str(start.get("host", "")))


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """The lines that are whole; a machine that loses power may leave others."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict) and (_is_start(record) or _is_end(record)):
                yield record


def _is_start(record: dict[str, Any]) -> bool:
    return _is_time(record.get("started")) and _is_time(record.get("seen", 0))


def _is_end(record: dict[str, Any]) -> bool:
    return "started" not in record and record.get("how") in get_args(How) and _is_time(record.get("ended"))


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value < 1e11


def _append(directory: Path, record: dict[str, Any]) -> None:
    path = directory / ATTEMPTS
    failpoint(f"append-before:{path.name}")
    with disk_errors(path), path.open("a") as file:
        file.write(json.dumps(record) + "\n")
    failpoint(f"append-after:{path.name}")


def last_sign_of_life(directory: Path) -> float:
    """When the stage in `directory` was last heard of, in seconds since 1970; 0: never."""
    times = [0.0]
    for name in _SIGNS_OF_LIFE:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            times.append((directory / name).stat().st_mtime)
    return max(times)
