"""What a run is for: tasks without a directory of their own."""

from __future__ import annotations

import luigi

from pipeline.stage import Stage


class Goal(luigi.Task):
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
