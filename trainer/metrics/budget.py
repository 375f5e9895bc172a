"""Training for a given time: how many optimizer steps fit into it, and the record that fixes their number.

Imports no torch, as the pipeline uses it too.
"""

from __future__ import annotations

import bisect
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.console import clock
from common.duration import Duration
from common.errors import AgreedError, UserError
from common.files import has_types, read_json, write_json
from common.options import fields_of
from trainer.checkpoint.directory import CHECKPOINTS, checkpoints
from trainer.config import TrainConfig
from trainer.data.batch_ramp import BatchRamp
from trainer.registry import longest_warmup

#: In a training's directory: the record of each phase that is trained for a given time, by phase number.
BUDGET = "budget.json"
#: What is read of a record, with the types that are allowed.
_RECORD: dict[str, Any] = {"budget_s": (int, float), "max_steps": int, "training": dict}
#: Steps that have to fit: fewer would be no training, and their number would depend on measurement noise.
LEAST_STEPS = 10
#: More steps than any budget holds.
UNBOUNDED_STEPS = 1 << 40


@dataclass(frozen=True)
class Pace:
    """What is measured before training; all in seconds."""

    #: An optimizer step of the whole global batch.
    step_s: float
    #: A comparison of the workers' copies, which precedes every checkpoint.
    check_s: float
    #: Copying the state for a checkpoint; it is written while training continues.
    copy_s: float
    #: The part of the budget that is spent when training begins.
    spent_s: float


def steps_within(budget_s: float, pace: Pace, config: TrainConfig, global_batch_size: int, *, compares: bool) -> int:
    """How many optimizer steps, with their checkpoints, take at most `budget_s` seconds. `compares`: whether there are
    workers whose copies are compared every `replica_check_steps`."""
    ramp = BatchRamp(config.batch_ramp_steps, config.batch_ramp_parts)
    every, minutes = config.ckpt_interval_steps, config.ckpt_interval_minutes
    save_s, checks = pace.check_s + pace.copy_s, config.replica_check_steps if compares else 0

    def seconds(steps: int) -> float:
        ramped = min(steps, ramp.steps)
        whole = steps - ramped + sum(ramp.size(step, global_batch_size) for step in range(ramped)) / global_batch_size
        pauses = (steps // every if every > 0 else 0) * save_s + (steps // checks if checks else 0) * pace.check_s
        trained = whole * pace.step_s + pauses
        return trained + (trained / (60 * minutes) * save_s if minutes else 0)

    return bisect.bisect_right(range(1, UNBOUNDED_STEPS), budget_s - pace.spent_s, key=seconds)


def fixed_steps(directory: Path, phase: int) -> int | None:
    """The number of steps measured for the budget of a phase of the training in `directory`; None: not measured yet."""
    record = _read(directory, phase)
    return None if record is None else int(record["max_steps"])


def recorded_steps(config: TrainConfig, training: dict[str, Any]) -> int | None:
    """The steps that were measured for the phase's budget by an earlier start of the same training; None: none were.

    `training`: what identifies it. Raises `UserError` if the phase has begun without this budget.
    """
    assert config.budget is not None
    record = _read(config.output_dir, config.phase)
    directory = config.output_dir / CHECKPOINTS
    if any(step > config.phase1_end_step for step, _ in checkpoints(directory)):
        begun = "--max_steps" if record is None else f"--budget {Duration(record['budget_s'])}"
        if record is None or record["budget_s"] != config.budget:
            raise UserError(
                f"--budget {config.budget}: the training in {config.output_dir} has begun with {begun}; continue with "
                f"that, or give another --output_dir"
            )
    elif record is None or (record["budget_s"], record["training"]) != (config.budget, _plain(training)):
        return None
    return int(record["max_steps"])


def fix(config: TrainConfig, training: dict[str, Any], pace: Pace, steps: int) -> None:
    """Record the number of steps, durably: from now on it is the phase's. Raises `DiskError`."""
    measured = {name: round(value, 6) for name, value in vars(pace).items()}
    record = {"budget_s": config.budget, "max_steps": steps, "measured": measured, "training": training}
    path = config.output_dir / BUDGET
    write_json(path, {**(read_json(path) or {}), str(config.phase): record})


def require_enough(config: TrainConfig, pace: Pace, steps: int) -> None:
    """Raise `AgreedError` if `steps` are too few for a training."""
    warmup, most = config.warmup_steps, longest_warmup(config.schedule, max_steps=steps, decay_share=config.decay_share)
    if steps < LEAST_STEPS or most < warmup:
        fit = f"{steps} steps fit" + (f", {most} of them before the decay" if most < min(steps, warmup) else "")
        why = f"warmup_steps = {warmup}" if most < warmup else f"the least, {LEAST_STEPS}"
        raise AgreedError(
            f"--budget {config.budget} is too short: a step takes {pace.step_s:.3g} s and {clock(pace.spent_s)} are "
            f"spent before the first, so {fit}, fewer than {why}; give a longer budget or smaller steps"
        )


def identity(config: TrainConfig, *others: dict[str, Any]) -> dict[str, Any]:
    """What tells a phase's training from others in the same directory: what decides the result, except the length."""
    decide = [name for name, (_, about) in fields_of(config).items() if about.decides]
    mine = {name: getattr(config, name) for name in decide if name not in ("max_steps", "micro_batch_size")}
    return mine | {name: value for other in others for name, value in other.items()}


def _read(directory: Path, phase: int) -> dict[str, Any] | None:
    record = (read_json(directory / BUDGET) or {}).get(str(phase))
    return record if has_types(record, _RECORD) else None


def _plain(value: dict[str, Any]) -> Any:
    """`value` as JSON gives it back."""
    return json.loads(json.dumps(value))
