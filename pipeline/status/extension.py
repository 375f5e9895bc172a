"""Which earlier training a new one can continue from: the two share everything up to the end of a stable schedule."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.files import read_json
from common.options import fields_of
from pipeline.status.chain import StageTask
from pipeline.status.stage_dirs import StageDir, StageDirs
from stages.directory.manifest import Identity
from trainer.checkpoint.directory import CHECKPOINTS, checkpoints, whole_checkpoints
from trainer.checkpoint.stable import stable_step
from trainer.config import TrainConfig
from trainer.metrics.budget import UNBOUNDED_STEPS
from trainer.optim.schedule import DECAY_OPTIONS
from trainer.registry import stable_steps

#: In a training's directory: which one it continued from.
EXTENDED_FROM = "extended_from.json"


@dataclass(frozen=True)
class StableCheckpoint:
    """A checkpoint of another training's stable part that is valid by manifest and file sizes."""

    stage_dir: StageDir
    path: Path
    #: Within its phase.
    step: int

    def __str__(self) -> str:
        return f"step {self.step:,} of {self.stage_dir.path.name}"


def shared_identity(record: dict[str, Any]) -> Identity | None:
    """The identity of the stable part of a training with the identity `record`; None: it has no stable part."""
    if not _stable_steps(record):
        return None
    its_end = (*DECAY_OPTIONS, "budget")
    parameters = {name: value for name, value in record["parameters"].items() if name not in its_end}
    return Identity.of_record({**record, "parameters": parameters})


def _stable_steps(record: dict[str, Any]) -> int:
    """With a budget, which is not measured before the training begins: as if it never ended."""
    given = {name: record["parameters"].get(name, fields_of(TrainConfig)[name][0].default) for name in DECAY_OPTIONS}
    if "max_steps" not in record["parameters"]:
        given["max_steps"] = UNBOUNDED_STEPS
    return stable_steps(**given)


def stable_checkpoints(task: StageTask, stage_dirs: StageDirs) -> Iterator[StableCheckpoint]:
    """The checkpoints that `task`, if it has none of its own, can continue from, the last step first. A training with a
    budget has none, as its decay is not known before it is measured."""
    mine = task.identity.record()
    shared = shared_identity(mine) if "max_steps" in mine["parameters"] else None
    if shared is None or checkpoints(task.directory / CHECKPOINTS):
        return iter(())
    # A sweep's trial goes only up to its rung.
    latest = min(_stable_steps(mine), getattr(task, "stop_step", None) or sys.maxsize)
    found = [
        StableCheckpoint(other, path, step)
        for other in stage_dirs.others(task.label, task.identity.fingerprint)
        if shared_identity(other.record) == shared
        for _, path in whole_checkpoints(other.path / CHECKPOINTS)
        if (step := stable_step(path)) is not None and step <= latest
    ]
    return iter(sorted(found, key=lambda checkpoint: checkpoint.step, reverse=True))


def stored_checkpoint(task: StageTask) -> str | None:
    """The store's checkpoint from which a run would resume `task`: "ckpt_80 in the store"; None: there is none, or one
    here is as new. Raises `UserError`."""
    here = next((step for step, _ in whole_checkpoints(task.directory / CHECKPOINTS)), -1)
    return f"ckpt_{task.stored_step} in the store" if task.stored_step > here else None


def continues_from(task: StageTask, stage_dirs: StageDirs) -> str | None:
    """From which checkpoint of the store, or else of another training here, a run would continue `task`; None: of
    none. Raises `UserError`."""
    stable = next(stable_checkpoints(task, stage_dirs), None)
    return stored_checkpoint(task) or (None if stable is None else str(stable))


def extended_from(directory: Path) -> str | None:
    """What the training in `directory` continued from: "step 80 of pretrain-phase1-0123456789"."""
    record = read_json(directory / EXTENDED_FROM) or {}
    step, name = record.get("step"), record.get("directory")
    return f"step {step:,} of {name}" if isinstance(step, int) and isinstance(name, str) else None
