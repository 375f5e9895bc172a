"""Goals: tasks without a directory, which name the purpose of a run."""

from __future__ import annotations

import luigi

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


@luigi.Task.event_handler(luigi.Event.DEPENDENCY_PRESENT)  # type: ignore[untyped-decorator]
def _print_summary_again(task: luigi.Task) -> None:
    """Luigi skips completed goals; print the summary anyway."""
    if isinstance(task, Goal):
        task.print_summary()
