"""How often a training is started again: as long as it gets further."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from common.errors import EXIT_NODE_MISSING, EXIT_USER_ERROR
from trainer.checkpoint.directory import CHECKPOINTS, whole_checkpoints

#: Restarts in a row without one more checkpoint before training is given up.
MAX_RESTARTS = 3
#: Exit statuses of what a person has to put right first: it is not tried again.
FINAL_STATUSES = (EXIT_USER_ERROR, 2, EXIT_NODE_MISSING)


@dataclass(frozen=True)
class Restarts:
    """At which step it was started again last, and how often it has been there."""

    step: int = -1
    count: int = 0

    def at(self, step: int) -> Restarts:
        """One more restart, from checkpoint `step`."""
        return Restarts(step, self.count + 1 if step == self.step else 1)

    @property
    def are_too_many(self) -> bool:
        return self.count > MAX_RESTARTS

    def record(self) -> dict[str, int]:
        return dataclasses.asdict(self)


def checkpoint_steps(directory: Path) -> set[int]:
    """The global steps of the whole checkpoints in a training's directory: those of the branch that it is on."""
    return {step for step, _ in whole_checkpoints(directory / CHECKPOINTS)}


def newest_checkpoint(directory: Path) -> int:
    """The global step of the newest one; 0 if there is none."""
    return max(checkpoint_steps(directory), default=0)
