"""Base class of all tasks: loads the settings and makes task ids unique on a central scheduler."""

from __future__ import annotations

import hashlib
from typing import Any

import luigi

from pipeline.luigi_adapters import exits
from pipeline.settings.load import load


class PipelineTask(luigi.Task):
    """A task that reads the settings."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]
        with exits.while_scheduling():
            self.settings = load()
        # Stages of different work directories must not block each other on a shared luigid.
        place = hashlib.sha256(str(self.settings.work_dir.resolve()).encode()).hexdigest()
        self.task_id = f"{self.task_id}_{place[:10]}"
