"""Checkpoints of the part of a training that does not depend on its end. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from common.errors import CheckpointError
from trainer.registry import STATELESS_OPTIMIZERS
from trainer.state import TrainState


def stable_step(checkpoint: Path) -> int | None:
    """The step, within its phase, of a checkpoint of a stable part; None if it is of none, or cannot be continued."""
    state = _stable_state(checkpoint)
    return None if state is None else state.step


def ends_stable_part(checkpoint: Path) -> bool:
    """Whether it is the last checkpoint of a stable part, and can be continued."""
    state = _stable_state(checkpoint)
    return state is not None and state.step == state.stable_steps


def _stable_state(checkpoint: Path) -> TrainState | None:
    """Its state, if it is of a stable part and can be continued."""
    try:
        state = TrainState.read(checkpoint)
    except (OSError, ValueError, CheckpointError):  # damaged, or of another version
        return None
    is_minimal = state.optimizer not in STATELESS_OPTIMIZERS and not any(checkpoint.glob("optimizer-*"))
    return None if is_minimal or state.step > state.stable_steps else state
