"""Goals: tasks without a directory of their own, which name what a run is for."""

from __future__ import annotations

import luigi

from pipeline.tasks.base import PipelineTask
from pipeline.tasks.stage import Stage


class Goal(PipelineTask):
    """Everything up to some stages, and a few lines at the end."""

    def complete(self) -> bool:
        return all(task.complete() for task in self.requires().values())

    def requires(self) -> dict[str, Stage]:
        raise NotImplementedError

    def ends(self) -> list[Stage]:
        """The stages that nothing else of the run is made from."""
        return list(self.requires().values())

    def run(self) -> None:
        self.print_summary()

    def print_summary(self) -> None:
        """A few lines on what was made and where it is."""
        raise NotImplementedError


@luigi.Task.event_handler(luigi.Event.DEPENDENCY_PRESENT)  # type: ignore[untyped-decorator]
def _print_summary_again(task: luigi.Task) -> None:
    """Luigi skips completed goals; print the summary anyway."""
    if isinstance(task, Goal):
        task.print_summary()
