"""A run of the chain as data for views: each stage's state, record and attempts, and the training curves."""

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
from trainer.metrics.budget import fixed_steps

#: Settings by section, as strings: {"phase1": {"lr": "0.001"}}.
Settings = Mapping[str, Mapping[str, str]]


_FOREMOST = ("failed", "running", "damaged", "refused", "interrupted")
_IS = {"failed": "has failed", "running": "is running", "damaged": "is damaged", "refused": "is refused",
       "interrupted": "was interrupted"}  # fmt: skip


@dataclass
class Run:
    """The data of a view."""

    #: In execution order.
    stages: Sequence[StageStatus]
    settings: Settings = field(default_factory=dict)
    #: Metrics files of an earlier view of the same run, so that only new lines are read.
    metrics: dict[Path, MetricsFile] = field(default_factory=dict)
    #: Unix time of this view, in seconds.
    written: float = field(default_factory=time.time)

    def stage(self, label: str) -> StageStatus | None:
        return next((stage for stage in self.stages if stage.stage == label), None)

    def counts(self, label: str) -> dict[str, Any]:
        """A stage's counts; {} if it is missing or incomplete."""
        stage = self.stage(label)
        return {} if stage is None else stage.counts

    @property
    def trainings(self) -> dict[int, StageStatus]:
        """The training stages by phase number."""
        found = ((phase, self.stage(f"pretrain-phase{phase}")) for phase in (1, 2))
        return {phase: stage for phase, stage in found if stage is not None}

    @functools.cached_property
    def curves(self) -> dict[int, Curves]:
        """The curves of each phase with recorded steps."""
        found = {}
        for phase, stage in self.trainings.items():
            if stage.directory is not None:
                path = stage.directory / METRICS
                curves = self.metrics.setdefault(path, MetricsFile(path)).read()
                if curves.steps:
                    found[phase] = curves
        return found

    def setting(self, phase: int, name: str) -> Any:
        """A setting of a phase as recorded when it began; None if it has not begun."""
        return self.trainings[phase].record.get("parameters", {}).get(name) if phase in self.trainings else None

    def planned_steps(self, phase: int) -> int | None:
        """The optimizer steps of a phase; None if it has not begun, or its budget is not measured yet."""
        given, directory = self.setting(phase, "max_steps"), self.trainings[phase].directory
        if given is not None or directory is None:
            return None if given is None else int(given)
        return fixed_steps(directory, phase)

    def restarts(self, phase: int) -> list[int]:
        """The first step after each restart of a phase."""
        if phase not in self.curves:
            return []
        curves = self.curves[phase]
        later = (curves.step_after(attempt.started) for attempt in self.trainings[phase].attempts[1:])
        return [step for step in later if step is not None]

    @property
    def model(self) -> Path | None:
        """The Hugging Face directory; None until the merge is complete."""
        merged = self.stage("merge_shards")
        return merged.directory / "model" if merged and merged.is_complete and merged.directory else None

    @property
    def model_bytes(self) -> int:
        """The size of that directory in bytes; 0 until the merge is complete."""
        merged = self.stage("merge_shards")
        return (merged.bytes or 0) if merged else 0

    @property
    def headline(self) -> tuple[str, str]:
        """The state of the run and a short description, from the stage that most needs attention."""
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
