"""Checkpoints of the part of a training that does not depend on its end. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from common.errors import CheckpointError
from trainer.registry import STATELESS_OPTIMIZERS
from trainer.state import TrainState


def stable_step(checkpoint: Path) -> int | None:
    """The step, within its phase, of a checkpoint of a stable part; None if it is of none, or cannot be continued."""
    state = _state_of(checkpoint)
    if state is None:
        return None
    is_minimal = state.optimizer not in STATELESS_OPTIMIZERS and not any(checkpoint.glob("optimizer-*"))
    return None if is_minimal or state.step > state.stable_steps else state.step


def ends_stable_part(checkpoint: Path) -> bool:
    """Whether it is the last checkpoint of a stable part, and can be continued."""
    state = _state_of(checkpoint)
    return state is not None and stable_step(checkpoint) == state.stable_steps


def _state_of(checkpoint: Path) -> TrainState | None:
    try:
        return TrainState.read(checkpoint)
    except (OSError, ValueError, CheckpointError):  # damaged, or of another version
        return None
