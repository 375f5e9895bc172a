"""The state of a stage, which `status`, `--json`, `watch`, the report and the model card all show."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from stages.directory import attempts
from stages.directory.manifest import why_incomplete
from stages.directory.records import read_identity, read_manifest


@dataclass(frozen=True)
class StageStatus:
    """A stage and its state; the fields are those of `--json`."""

    #: `<stage>[-phase<N>]`, as in the name of its directory.
    stage: str
    #: Name of the luigi task; empty where only the directory is known.
    task: str = ""
    phase: int | None = None
    #: complete, running, …: docs/recovery.md explains each. "unfinished" where only the directory is known.
    state: str = "waiting"
    #: What else there is to say, in one line.
    detail: str = ""
    #: When it started (complete, running) or was seen last (interrupted, failed), UTC.
    when: str | None = None
    #: How long it took, or has been running.
    seconds: float | None = None
    #: None: not begun.
    directory: Path | None = None
    fingerprint: str | None = None
    #: Units done, of how many, of what, how many a second, and the seconds that leaves.
    done: int | None = None
    total: int | None = None
    unit: str | None = None
    per_s: float | None = None
    left_s: float | None = None
    #: Who holds its lock.
    host: str | None = None
    pid: int | None = None

    @classmethod
    def of_directory(cls, directory: Path) -> StageStatus:
        """What a directory alone tells: whether the stage in it is complete."""
        record = read_identity(directory) or {}
        phase = record.get("phase")
        label = str(record.get("stage", directory.name)) + ("" if phase is None else f"-phase{phase}")
        reason = why_incomplete(directory, str(record.get("fingerprint")))
        state = "unfinished" if reason else "complete"
        return cls(label, phase=phase, state=state, detail=reason or "", directory=directory)

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "directory": None if self.directory is None else str(self.directory)}

    @functools.cached_property
    def record(self) -> dict[str, Any]:
        """Its manifest.json, stage.json where there is none, {} where it has not begun."""
        if self.directory is None:
            return {}
        return read_manifest(self.directory) or read_identity(self.directory) or {}

    @property
    def is_complete(self) -> bool:
        return self.state == "complete"

    @property
    def counts(self) -> dict[str, Any]:
        """What it counted; {} until it is complete."""
        return dict(self.record.get("counts") or {}) if self.is_complete else {}

    @property
    def bytes(self) -> int | None:
        """The size of its outputs; None until it is complete."""
        return sum(output["bytes"] for output in self.record["outputs"]) if self.is_complete else None

    @functools.cached_property
    def attempts(self) -> list[attempts.Attempt]:
        """Oldest first. One without a record of them (the command was run by hand) is taken for a single one."""
        if self.directory is None:
            return []
        found = attempts.read(self.directory, running=self.state == "running", complete=self.is_complete)
        if not found and self.is_complete:
            began = datetime.fromisoformat(self.record["started"]).timestamp()
            return [attempts.Attempt(began, began + self.record["seconds"], "complete")]
        return found

    @property
    def stops(self) -> int:
        """How often it ended before it was complete."""
        return sum(attempt.how not in ("complete", "running") for attempt in self.attempts)

    @property
    def seconds_at_work(self) -> float:
        """How long it was at work, in all attempts."""
        return sum(attempt.seconds for attempt in self.attempts)
