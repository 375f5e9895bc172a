"""Checkpoints of the part of a training that does not depend on its end. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from common.errors import CheckpointError
from trainer.registry import STATELESS_OPTIMIZERS
from trainer.state import TrainState


def stable_step(checkpoint: Path) -> int | None:
    """The step, within its phase, of a checkpoint of a stable part; None if it is of none, or cannot be continued."""
    try:
        state = TrainState.read(checkpoint)
    except (OSError, ValueError, CheckpointError):  # damaged, or of another version
        return None
    is_minimal = state.optimizer not in STATELESS_OPTIMIZERS and not any(checkpoint.glob("optimizer-*"))
    return None if is_minimal or state.step > state.stable_steps else state.step
