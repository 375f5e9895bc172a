"""A run of the chain as facts, for whoever draws them: each stage with its state, record, attempts, and the curves."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.files import METRICS
from stages.view.curves import Curves, MetricsFile
from stages.view.status import StageStatus

#: Settings by section, as strings: {"phase1": {"lr": "0.001"}}.
Settings = Mapping[str, Mapping[str, str]]


_FOREMOST = ("failed", "running", "damaged", "refused", "interrupted")
_IS = {"failed": "has failed", "running": "is running", "damaged": "is damaged", "refused": "is refused",
       "interrupted": "was interrupted"}  # fmt: skip


@dataclass
class Run:
    """What a view shows."""

    #: In running order.
    stages: Sequence[StageStatus]
    settings: Settings = field(default_factory=dict)
    #: Of earlier looks at the same run, so that only what is new is read.
    metrics: dict[Path, MetricsFile] = field(default_factory=dict)
    #: When this was looked at, seconds since 1970.
    written: float = field(default_factory=time.time)

    def stage(self, label: str) -> StageStatus | None:
        return next((stage for stage in self.stages if stage.stage == label), None)

    def counts(self, label: str) -> dict[str, Any]:
        """What a stage counted; {} if it is not there or not complete."""
        stage = self.stage(label)
        return {} if stage is None else stage.counts

    @property
    def trainings(self) -> dict[int, StageStatus]:
        """The phases that are trained, by number."""
        found = ((phase, self.stage(f"pretrain-phase{phase}")) for phase in (1, 2))
        return {phase: stage for phase, stage in found if stage is not None}

    @functools.cached_property
    def curves(self) -> dict[int, Curves]:
        """The curves of each phase that has begun."""
        found = {}
        for phase, stage in self.trainings.items():
            if stage.directory is not None:
                path = stage.directory / METRICS
                curves = self.metrics.setdefault(path, MetricsFile(path)).read()
                if curves.steps:
                    found[phase] = curves
        return found

    def setting(self, phase: int, name: str) -> Any:
        """A setting that decided a phase, as it was recorded when that began; None if it has not."""
        return self.trainings[phase].record.get("parameters", {}).get(name) if phase in self.trainings else None

    def restarts(self, phase: int) -> list[int]:
        """The steps with which a phase went on after it had been stopped."""
        if phase not in self.curves:
            return []
        curves = self.curves[phase]
        later = (curves.step_after(attempt.started) for attempt in self.trainings[phase].attempts[1:])
        return [step for step in later if step is not None]

    @property
    def model(self) -> Path | None:
        """The Hugging Face directory, once it is there."""
        merged = self.stage("merge_shards")
        return merged.directory / "model" if merged and merged.is_complete and merged.directory else None

    @property
    def model_bytes(self) -> int:
        """The size of that directory; 0 before it is there."""
        merged = self.stage("merge_shards")
        return (merged.bytes or 0) if merged else 0

    @property
    def headline(self) -> tuple[str, str]:
        """The state of the run, and a few words on it: those of the stage that asks for most attention."""
        for state in _FOREMOST:
            for stage in self.stages:
                if stage.state == state:
                    return state, ": ".join(
                        part for part in (f"{stage.stage} {_IS.get(state, state)}", stage.detail) if part
                    )
        if all(stage.is_complete for stage in self.stages):
            return "complete", "complete"
        done = sum(stage.is_complete for stage in self.stages)
        return "waiting", f"{done} of {len(self.stages)} stages are complete"
