"""Base classes of training stages, for their command and manifest, and of evaluations of the trained models."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, ClassVar

import luigi

from common.errors import UserError
from common.files import METRICS, read_json
from common.options import fields_of, name_of, words
from pipeline.launchers.torchrun import trainer_command
from pipeline.luigi_adapters.luigid_progress import has_audience
from pipeline.status import trackers
from pipeline.status.extension import EXTENDED_FROM
from pipeline.tasks.stage import Stage
from stages.directory import attempts, manifest
from stages.directory.manifest import StartTime
from stages.view.curves import MetricsFile
from stages.view.goodput import goodput_of
from trainer.checkpoint.directory import CHECKPOINTS, checkpoint_path
from trainer.config import TrainConfig


class Training(Stage):
    """A stage that runs the trainer, which resumes from its last checkpoint."""

    #: Increment when the same settings produce a different training.
    format_version: ClassVar[int] = 1
    on_cluster = on_all_nodes = resumes = imports_torch = True

    def parameters(self) -> dict[str, Any]:
        """The settings that identify the result."""
        raise NotImplementedError

    def inputs(self) -> dict[str, Any]:
        """Identifies what the training starts from, if that is not a stage of its chain. Raises `UserError`."""
        return {}

    @functools.cached_property
    def identity(self) -> manifest.Identity:
        phase = getattr(self, "phase", None)
        return manifest.Identity(
            self.stage, self.format_version, phase, self.parameters(), self.inputs(), self.upstream()
        )

    @property
    def accepts_messages(self) -> bool:
        """Read by luigi; `luigid_progress` handles the messages."""
        return has_audience()

    def launched(self, section: luigi.Config, **others: Any) -> list[str]:
        """The command that starts the trainer on all workers.

        Its options are the settings of [run], [cluster] and `section` that are fields of `TrainConfig`, updated by
        `others`; None omits an option.
        """
        given: dict[str, Any] = {}
        for settings in (self.settings.run, self.settings.cluster, section):
            given |= {name: getattr(settings, name) for name in fields_of(TrainConfig) if name in settings.param_kwargs}
        options = {_option_name(name): value for name, value in (given | others).items() if value is not None}
        command = trainer_command(self.settings.cluster, options, port_offset=self.port_offset)
        # A trial has no output and is not shown in trackers.
        return command + (words(self.settings.trackers.options) if "output_dir" in others else [])

    @property
    def hang_timeout_s(self) -> float:
        return self.settings.cluster.hang_timeout_s

    def finish(self, start: StartTime) -> None:
        """Write the manifest: the last checkpoint is the output, the trainer's results are the counts."""
        results = read_json(self.directory / "results.json")
        if results is None:
            raise UserError(f"{self.directory / 'results.json'} is missing although training ended; run the same again")
        if self.max_steps is not None and results["steps"] < self.max_steps:
            raise UserError(
                f"{self.label} ended with exit status 0 at step {results['steps']} of {self.max_steps}; "
                f"run the same again"
            )
        name = str(checkpoint_path(Path(CHECKPOINTS), results["global_step"]))
        entries = read_json(self.directory / name / "manifest.json")
        if entries is None:
            raise UserError(f"{self.directory / name} is missing although training ended; run the same again")
        outputs = [manifest.Output(f"{name}/{e['path']}", e["bytes"], e["sha256"]) for e in entries["files"]]
        outputs.append(manifest.Output.of(self.directory, self.directory / name / "manifest.json"))
        extended = read_json(self.directory / EXTENDED_FROM)
        spent = goodput_of(
            self.directory,
            attempts.read(self.directory, running=False, complete=True),
            MetricsFile(self.directory / METRICS).read(),
        )
        counts = {**results, "checkpoint": name, "goodput": spent.record()}
        counts |= {"extended_from": extended} if extended else {}
        manifest.finish(self.directory, self.identity, outputs, counts, start=start)


class EvaluationStage(Stage):
    """A stage that evaluates what a training has made."""

    def finish(self, start: StartTime) -> None:
        """Send the results to the trackers of the training."""
        trackers.send(self)


def _option_name(field: str) -> str:
    """The trainer's option for a field of `TrainConfig` or of the workload's options."""
    return name_of(TrainConfig, field) if field in fields_of(TrainConfig) else f"--{field}"
