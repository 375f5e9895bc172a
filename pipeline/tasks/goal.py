"""What a run is for, tasks without a directory of their own; and the stages that these are made from."""

from __future__ import annotations

import luigi

from common.errors import UserError
from pipeline.tasks.base import PipelineTask
from pipeline.tasks.stage import Stage


class Goal(PipelineTask):
    """Everything up to some stages, and a few lines at the end."""

    def complete(self) -> bool:
        return all(task.complete() for task in self.requires().values())

    def requires(self) -> dict[str, Stage]:
        raise NotImplementedError

    def run(self) -> None:
        self.tell()

    def tell(self) -> None:
        """Say what there is."""
        raise NotImplementedError


@luigi.Task.event_handler(luigi.Event.DEPENDENCY_PRESENT)  # type: ignore[untyped-decorator]
def tell_again(task: luigi.Task) -> None:
    """A goal that was reached before is not run: say what there is all the same."""
    if isinstance(task, Goal):
        task.tell()


def _ends(goal: Goal | Stage) -> list[Stage]:
    """What nothing else of the run is made from."""
    return [goal] if isinstance(goal, Stage) else list(goal.requires().values())


def chain(goal: Goal | Stage) -> list[Stage]:
    """Every stage that `goal` is made from, itself included, in running order: by depth, then by name."""
    depths: dict[Stage, int] = {}

    def depth(task: Stage) -> int:
        if task not in depths:
            depths[task] = max((depth(upstream) + 1 for upstream in task.requires().values()), default=0)
        return depths[task]

    for task in _ends(goal):
        depth(task)
    return sorted(depths, key=lambda task: (depths[task], task.label))


def is_complete(task: Stage) -> bool:
    """Whether `task` is complete; False too when its identity cannot be computed."""
    try:
        return task.why_incomplete() is None
    except UserError:
        return False


def would_run(goal: Goal | Stage) -> list[Stage]:
    """The stages that a run of `goal` would start, in running order: luigi does not look behind a complete one."""
    needed: set[Stage] = set()

    def need(task: Stage) -> None:
        if task not in needed and not is_complete(task):
            needed.add(task)
            for upstream in task.requires().values():
                need(upstream)

    for task in _ends(goal):
        need(task)
    return [task for task in chain(goal) if task in needed]
