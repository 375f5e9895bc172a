"""What all tasks of the pipeline share: the settings, and a name that is theirs alone on a central scheduler."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Iterator
from typing import Any

import luigi
from luigi.retcodes import retcode

from common.errors import UserError
from pipeline.settings.load import load
from pipeline.tasks.luigi_workers import Leave


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """A `UserError` in the block, which is before anything has started, ends luigi with one line."""
    try:
        yield
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise Leave(retcode().scheduling_error) from None


class PipelineTask(luigi.Task):
    """A task that reads the settings."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]
        with refusals():
            self.settings = load()
        # One luigid may serve several work directories: their stages must not wait for each other.
        place = hashlib.sha256(str(self.settings.work_dir.resolve()).encode()).hexdigest()
        self.task_id = f"{self.task_id}_{place[:10]}"
