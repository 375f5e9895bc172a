"""The stages of a sweep's trials: phase 1 up to a rung, and phase 1's own evaluation."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import ClassVar

import luigi

from common.errors import UserError
from common.secrets import Secret
from pipeline.status.stage_dirs import last_checkpoint_step
from pipeline.tasks.bert import Evaluate, MergeShards, Pretrain
from pipeline.tasks.dataset import dataset_of
from pipeline.tasks.stage import Stage
from stages.directory.manifest import StartTime
from stages.merge import MergeOptions
from trainer.checkpoint.directory import CHECKPOINTS, checkpoint_path


class PretrainToRung(Pretrain):
    """Phase 1 up to a step, where it saves a checkpoint. It shares the directory of `Pretrain`, which goes on there."""

    phase = 1
    stop_step: luigi.IntParameter = luigi.IntParameter(description="stop after this step")

    @property
    def stage(self) -> str:
        return "pretrain"

    @property
    def checkpoint(self) -> Path:
        """The checkpoint of the rung; removed when training continues."""
        return checkpoint_path(self.directory / CHECKPOINTS, self.stop_step)

    def why_incomplete(self) -> str | None:
        reason = super().why_incomplete()
        if reason is None or (last_checkpoint_step(self.directory) or 0) >= self.stop_step:
            return None
        return reason

    def command(self) -> list[str]:
        return [*super().command(), "--steps_this_run", str(self.stop_step)]

    def finish(self, start: StartTime) -> None:
        """Write no manifest: the phase is not complete. Raises `UserError` if the rung was not reached."""
        if reason := self.why_incomplete():
            raise UserError(f"{self.label} ended before step {self.stop_step}: {reason}; run the same again")


class _OfPhase1(Stage):
    stop_step: luigi.OptionalIntParameter = luigi.OptionalIntParameter(
        default=None, description="use the checkpoint of this step (default: the last)"
    )


class MergePhase1(_OfPhase1, MergeShards):
    """Phase 1's checkpoint as one Hugging Face directory."""

    @property
    def stage(self) -> str:
        return "merge_shards"

    def requires(self) -> dict[str, Stage]:
        pretrain: Stage
        if self.stop_step is None:
            pretrain = self.sibling(Pretrain, phase=1)
        else:
            pretrain = self.sibling(PretrainToRung, stop_step=self.stop_step)
        return {"pretrain": pretrain, **self.vocabulary(1)}

    def options(self) -> MergeOptions:
        options, pretrain = super().options(), self.requires()["pretrain"]
        if isinstance(pretrain, PretrainToRung):
            return dataclasses.replace(options, source=Secret.address(str(pretrain.checkpoint)), step=self.stop_step)
        return options


class EvaluatePhase1(_OfPhase1, Evaluate):
    """The evaluation of phase 1's model on the held-out examples of phase 1."""

    evaluated_phase: ClassVar[int] = 1

    @property
    def stage(self) -> str:
        return "evaluate"

    def requires(self) -> dict[str, Stage]:
        return {"merge_shards": self.sibling(MergePhase1, stop_step=self.stop_step), "dataset": dataset_of(self, 1)}
