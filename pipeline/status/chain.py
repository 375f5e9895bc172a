"""The stages of a chain, and those that a run would start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from common.errors import UserError
from pipeline.settings.sections import Settings
from stages.directory.manifest import Identity


class PlacedStage(Protocol):
    """A stage with a name and a directory (`pipeline.tasks.stage.Stage` documents the members)."""

    @property
    def label(self) -> str: ...
    @property
    def identity(self) -> Identity: ...
    @property
    def directory(self) -> Path: ...
    def why_incomplete(self) -> str | None: ...


class StageTask(PlacedStage, Protocol):
    """A stage's luigi task, as far as status needs it."""

    settings: Settings

    @property
    def max_steps(self) -> int | None: ...
    @property
    def resumes(self) -> bool: ...
    @property
    def stored(self) -> object | None: ...
    @property
    def stored_step(self) -> int: ...
    def requires(self) -> Mapping[str, StageTask]: ...
    def needs(self) -> Mapping[str, StageTask]: ...
    def ends(self) -> Sequence[StageTask]: ...
    def manifest(self) -> dict[str, Any]: ...


class ChainTask(Protocol):
    """A stage, or a goal that several stages make up."""

    settings: Settings

    def ends(self) -> Sequence[StageTask]:
        """The stages that no other stage of the chain depends on."""


def chain(task: ChainTask) -> list[StageTask]:
    """`task` and all its upstream stages in running order: by depth, then by name."""
    depths: dict[StageTask, int] = {}

    def depth(stage: StageTask) -> int:
        if stage not in depths:
            depths[stage] = max((depth(upstream) + 1 for upstream in stage.requires().values()), default=0)
        return depths[stage]

    for stage in task.ends():
        depth(stage)
    return sorted(depths, key=lambda stage: (depths[stage], stage.label))


def is_complete(stage: StageTask) -> bool:
    """Whether `stage` is complete; False too when its identity cannot be computed."""
    try:
        return stage.why_incomplete() is None
    except UserError:
        return False


def would_run(task: ChainTask) -> list[StageTask]:
    """The stages that a run of `task` would make or fetch, in running order: luigi does not look beyond one that is
    complete, or that the store has."""
    needed: set[StageTask] = set()

    def need(stage: StageTask) -> None:
        if stage not in needed and not is_complete(stage):
            needed.add(stage)
            for upstream in stage.needs().values():
                need(upstream)

    for stage in task.ends():
        need(stage)
    return [stage for stage in chain(task) if stage in needed]
