"""Goals: tasks without a directory, which name the purpose of a run."""

from __future__ import annotations

import luigi

from common.process import processes_asked_for
from pipeline.console.select import shown
from pipeline.status.chain import chain, is_complete
from pipeline.tasks.base import ChainTask
from pipeline.tasks.stage import Stage


class Goal(ChainTask):
    """Everything up to some stages, with a summary at the end."""

    def complete(self) -> bool:
        return all(task.complete() for task in self.requires().values())

    def requires(self) -> dict[str, Stage]:
        raise NotImplementedError

    def ends(self) -> list[Stage]:
        """The stages that no other stage of the run depends on."""
        return list(self.requires().values())

    def run(self) -> None:
        self.print_summary()

    def print_summary(self) -> None:
        """Print a few lines on the results and where they are."""
        raise NotImplementedError


_is_printed = False


@luigi.Task.event_handler(luigi.Event.DEPENDENCY_DISCOVERED)  # type: ignore[untyped-decorator]
def _print_header(task: luigi.Task, dependency: luigi.Task) -> None:
    """Before the first stage runs: what is made, where and on which device. The first task is the one asked for."""
    global _is_printed
    if _is_printed or not isinstance(task, (Goal, Stage)):
        return
    _is_printed, stages = True, chain(task)
    left = sum(not is_complete(stage) for stage in stages)
    if left:
        settings = task.settings
        where = f"device {settings.cluster.device}" if settings.cluster.device else "the device that is there"
        shown().header(
            f"{type(task).__name__}: {left} of {len(stages)} stages to make in {settings.work_dir}, {where}, "
            f"{processes_asked_for(0)} cores"
        )


@luigi.Task.event_handler(luigi.Event.DEPENDENCY_PRESENT)  # type: ignore[untyped-decorator]
def _print_summary_again(task: luigi.Task) -> None:
    """Luigi skips completed goals; print the summary anyway."""
    if isinstance(task, Goal):
        task.print_summary()
