"""Base class of all tasks: loads the settings and makes task ids unique on a central scheduler."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any, TypeVar

import luigi
from luigi.parameter import ParameterVisibility

from pipeline.console import select as console
from pipeline.luigi_adapters import exits
from pipeline.settings.load import overlaid

T = TypeVar("T", bound="ChainTask")


class PipelineTask(luigi.Task):
    """A task that reads the settings."""

    quiet: luigi.BoolParameter = luigi.BoolParameter(
        significant=False,
        positional=False,
        description="show notes, warnings and errors only, as --Run-console quiet does",
    )

    #: Settings that differ from those of the process: {section: {name: text}}.
    overlay: Mapping[str, Mapping[str, str]] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]
        with exits.while_scheduling():
            self.settings = overlaid(self.overlay)
        # Luigi creates the requested task first.
        console.choose_once(console.QUIET if self.quiet else self.settings.run.console)
        # Stages of different work directories must not block each other on a shared luigid.
        others = json.dumps(self.overlay, default=dict) if self.overlay else ""
        place = hashlib.sha256(os.fsencode(self.settings.work_dir.resolve()) + others.encode()).hexdigest()
        self.task_id = f"{self.task_id}_{place[:10]}"


class ChainTask(PipelineTask):
    """A task of the chain, which a trial of a sweep runs with settings of its own."""

    overlay: luigi.DictParameter = luigi.DictParameter(
        default={},
        visibility=ParameterVisibility.HIDDEN,  # may hold credentials; PRIVATE ones are lost in dynamic dependencies
        description='settings of this task and those before it, as JSON: {"phase1": {"lr": "0.01"}}',
    )

    def sibling(self, task: type[T], **parameters: Any) -> T:
        """Another task with the same settings."""
        return task(overlay=self.overlay, **parameters)
