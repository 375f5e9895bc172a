"""The state of each night in WORK/nights/<date>.state.json, for the next night and for monitors.

    {"status": "running", "started": "…Z", "host": "node-3", "pid": 4711, "line": ""}

A complete night has <date>.json instead. A night that is "running" while the lock is free was killed.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from common.errors import DiskError
from common.files import disk_errors, parse_utc, read_json, utc_now, write_json
from common.secrets import redact
from pipeline.tasks.nights import records
from stages.directory.lock import LOCK, is_held

_SUFFIX = ".state.json"
Status = Literal["complete", "running", "interrupted", "failed", "refused", "held", "killed", "missing", "rejected"]


@dataclass(frozen=True)
class NightState:
    """The state of one night."""

    status: Status
    #: Start time, UTC; empty if it did not start.
    started: str = ""
    host: str = ""
    pid: int = 0
    #: The reason if it failed, was refused or held.
    line: str = ""


def now(status: Status, line: str = "") -> NightState:
    """The state of a night in this process."""
    return NightState(status, utc_now(), socket.gethostname(), os.getpid(), line)


def write(nights: Path, date: datetime.date, state: NightState) -> None:
    """Raises `DiskError`."""
    write_json(nights / f"{date}{_SUFFIX}", asdict(state))


def write_ended(nights: Path, date: datetime.date, status: Status, line: str) -> None:
    """Record how a night ended; best effort, because the disk may be full."""
    with contextlib.suppress(DiskError), disk_errors(nights):
        nights.mkdir(parents=True, exist_ok=True)
        before = recorded(nights, date)
        started = before.started if before is not None else ""
        write(nights, date, NightState(status, started, socket.gethostname(), os.getpid(), redact(line)))


def forget(nights: Path, date: datetime.date) -> None:
    (nights / f"{date}{_SUFFIX}").unlink(missing_ok=True)


def recorded(nights: Path, date: datetime.date) -> NightState | None:
    """The last state that the night itself recorded; None if it recorded none, or it is damaged."""
    record = read_json(nights / f"{date}{_SUFFIX}") or {}
    if record.get("status") not in get_args(Status):
        return None
    kinds = {"host": str, "pid": int, "line": str}
    valid = {name: record[name] for name, kind in kinds.items() if isinstance(record.get(name), kind)}
    return NightState(record["status"], _valid(record.get("started")), **valid)


def _valid(started: Any) -> str:
    """The time that a record tells; empty if it tells none."""
    with contextlib.suppress(TypeError, ValueError):
        parse_utc(started)
        return str(started)
    return ""


def state_of(nights: Path, date: datetime.date) -> NightState:
    """The night's state now; changes nothing."""
    complete = records.read(nights / f"{date}.json")
    if complete is not None:
        started = _valid(complete.get("started"))
        if records.is_accepted(complete):
            return NightState("complete", started)
        return NightState("rejected", started, line=records.rejection(complete["gate"]))
    state = recorded(nights, date)
    if state is None:
        return NightState("missing")
    if state.status == "running" and not is_held(nights):
        return NightState("killed", state.started, state.host, state.pid)
    return state


def killed(nights: Path) -> Iterator[tuple[datetime.date, NightState]]:
    """Nights that were killed, oldest first. The caller holds the lock, so none of them is running."""
    for date in sorted(dates(nights)):
        state = recorded(nights, date)
        if state is not None and state.status == "running" and read_json(nights / f"{date}.json") is None:
            yield date, state


def running(nights: Path) -> tuple[datetime.date | None, str]:
    """The night that holds the lock, if known, and a description of its process."""
    holder = read_json(nights / LOCK) or {}
    who = f"process {holder.get('pid', '?')} on {holder.get('host', '?')} since {holder.get('started', '?')}"
    for date in dates(nights):
        state = recorded(nights, date)
        if state is not None and state.status == "running" and state.pid == holder.get("pid"):
            return date, who
    return None, who


def dates(nights: Path) -> set[datetime.date]:
    """All recorded nights."""
    found = set()
    for path in nights.glob("*.json"):
        with contextlib.suppress(ValueError):
            found.add(datetime.date.fromisoformat(path.name.removesuffix(_SUFFIX).removesuffix(".json")))
    return found
