"""The stages of a chain, and those that a run would start."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from common.errors import UserError
from pipeline.settings.sections import Settings
from stages.directory.manifest import Identity, StartTime


class StageTask(Protocol):
    """A stage's luigi task, as far as its status and its runner need it: `pipeline.tasks.stage.Stage`, which documents
    the members."""

    settings: Settings

    @property
    def label(self) -> str: ...
    @property
    def identity(self) -> Identity: ...
    @property
    def directory(self) -> Path: ...
    @property
    def max_steps(self) -> int | None: ...
    @property
    def resumes(self) -> bool: ...
    @property
    def restarts(self) -> bool: ...
    @property
    def nodes(self) -> int: ...
    @property
    def hang_timeout_s(self) -> float | None: ...
    @property
    def imports_torch(self) -> bool: ...
    @property
    def stored(self) -> object | None: ...
    @property
    def stored_step(self) -> int: ...
    def requires(self) -> Mapping[str, StageTask]: ...
    def needs(self) -> Mapping[str, StageTask]: ...
    def ends(self) -> Sequence[StageTask]: ...
    def why_incomplete(self) -> str | None: ...
    def manifest(self) -> dict[str, Any]: ...
    def prepare(self) -> None: ...
    def command(self) -> list[str]: ...
    def finish(self, start: StartTime) -> None: ...
    def making(self, *, attached: bool) -> contextlib.AbstractContextManager[bool]: ...


class ChainGoal(Protocol):
    """What a chain is run for: a stage, or a goal that several stages make up."""

    settings: Settings

    def ends(self) -> Sequence[StageTask]:
        """The stages that no other stage of the chain depends on."""


def chain(goal: ChainGoal) -> list[StageTask]:
    """The stages of `goal` and all those before them, in running order: by depth, then by name."""
    depths: dict[StageTask, int] = {}

    def depth(stage: StageTask) -> int:
        if stage not in depths:
            depths[stage] = max((depth(upstream) + 1 for upstream in stage.requires().values()), default=0)
        return depths[stage]

    for stage in goal.ends():
        depth(stage)
    return sorted(depths, key=lambda stage: (depths[stage], stage.label))


def is_complete(stage: StageTask) -> bool:
    """Whether `stage` is complete; False too when its identity cannot be computed."""
    try:
        return stage.why_incomplete() is None
    except UserError:
        return False


def would_run(goal: ChainGoal) -> list[StageTask]:
    """The stages that a run of `goal` would make or fetch, in running order: luigi does not look beyond one that is
    complete, or that the store has."""
    needed: set[StageTask] = set()

    def need(stage: StageTask) -> None:
        if stage not in needed and not is_complete(stage):
            needed.add(stage)
            for upstream in stage.needs().values():
                need(upstream)

    for stage in goal.ends():
        need(stage)
    return [stage for stage in chain(goal) if stage in needed]
