"""The state of a stage as shown by `status`, `--json`, `watch`, the report and the model card."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from stages.directory import attempts
from stages.directory.manifest import stage_label, why_incomplete
from stages.directory.records import read_identity, read_manifest


@dataclass(frozen=True)
class StageStatus:
    """A stage and its state; the fields are the keys of `--json`."""

    #: `<stage>[-phase<N>]`, as in the name of its directory.
    stage: str
    #: Name of the luigi task; empty if only the directory is known.
    task: str = ""
    phase: int | None = None
    #: complete, running, … (docs/recovery.md lists them); "unfinished" if only the directory is known.
    state: str = "waiting"
    #: Details in one line.
    detail: str = ""
    #: Start time (complete, running) or last activity (interrupted, failed), UTC.
    when: str | None = None
    #: Duration, or time since the start of a running stage.
    seconds: float | None = None
    #: None: not started.
    directory: Path | None = None
    fingerprint: str | None = None
    #: Progress: units done, total, unit name, rate, and remaining seconds.
    done: int | None = None
    total: int | None = None
    unit: str | None = None
    per_s: float | None = None
    left_s: float | None = None
    #: The process that holds its lock.
    host: str | None = None
    pid: int | None = None

    @classmethod
    def of_directory(cls, directory: Path) -> StageStatus:
        """The state as far as the directory alone tells: complete or unfinished."""
        record = read_identity(directory) or {}
        phase = record.get("phase")
        label = stage_label(str(record.get("stage", directory.name)), phase)
        reason = why_incomplete(directory, str(record.get("fingerprint")))
        state = "unfinished" if reason else "complete"
        return cls(label, phase=phase, state=state, detail=reason or "", directory=directory)

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "directory": None if self.directory is None else str(self.directory)}

    @functools.cached_property
    def record(self) -> dict[str, Any]:
        """Its manifest.json, else stage.json, else {}."""
        if self.directory is None:
            return {}
        return read_manifest(self.directory) or read_identity(self.directory) or {}

    @property
    def is_complete(self) -> bool:
        return self.state == "complete"

    @property
    def counts(self) -> dict[str, Any]:
        """Its counts; {} until it is complete."""
        return dict(self.record.get("counts") or {}) if self.is_complete else {}

    @property
    def bytes(self) -> int | None:
        """The size of its outputs in bytes; None until it is complete."""
        return sum(output["bytes"] for output in self.record["outputs"]) if self.is_complete else None

    @functools.cached_property
    def attempts(self) -> list[attempts.Attempt]:
        """Attempts, oldest first; a complete stage without recorded attempts (run by hand) counts as one."""
        if self.directory is None:
            return []
        found = attempts.read(self.directory, running=self.state == "running", complete=self.is_complete)
        if not found and self.is_complete:
            began = datetime.fromisoformat(self.record["started"]).timestamp()
            return [attempts.Attempt(began, began + self.record["seconds"], "complete")]
        return found

    @property
    def stops(self) -> int:
        """Number of attempts that ended before completion."""
        return sum(attempt.how not in ("complete", "running") for attempt in self.attempts)

    @property
    def seconds_at_work(self) -> float:
        """Total time of all attempts."""
        return sum(attempt.seconds for attempt in self.attempts)
