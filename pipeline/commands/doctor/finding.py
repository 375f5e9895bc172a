"""What one of the doctor's checks reports, and what it may look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pipeline.settings.sections import Settings
from pipeline.status.chain import chain, would_run
from pipeline.tasks.goal import Goal
from pipeline.tasks.stage import Stage

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line; the fields are the keys of `--json`."""

    #: What was looked at, in a word or two.
    check: str
    level: Level
    #: What was seen, and what to do if it is not ok.
    text: str


@dataclass
class Plan:
    """The run that is about to start."""

    task: Goal | Stage
    #: Its work directory, and then those of other runs.
    work_dirs: list[Path]
    #: Whether the store in the settings answers; set by its check, which precedes all checks that look at stages.
    store_answers: bool = True
    #: The device that [cluster] device stands for here; set by the check of the device, if it can tell.
    device: str = ""
    #: Servers that did not answer the checks that asked them.
    silent: set[str] = field(default_factory=set)
    #: How far servers' clocks were ahead of this machine's, in seconds, by server; filled by the checks that ask them.
    ahead_s: dict[str, float] = field(default_factory=dict)
    #: Bytes of what is to be downloaded, by setting; filled by the check that asks for it.
    lengths: dict[str, int] = field(default_factory=dict)

    @property
    def settings(self) -> Settings:
        return self.task.settings

    def stages(self) -> list[Stage]:
        """All stages of the chain, in running order."""
        found = chain(self.task)
        assert all(isinstance(stage, Stage) for stage in found)
        return [stage for stage in found if isinstance(stage, Stage)]

    def to_make(self) -> list[Stage]:
        """The stages that a run would make or fetch."""
        if not self.store_answers:
            for stage in self.stages():
                stage.make_here()  # the store cannot be asked what it has
        labels = {stage.label for stage in would_run(self.task)}
        return [stage for stage in self.stages() if stage.label in labels]


Check = Callable[[Plan], Iterator[Finding]]
