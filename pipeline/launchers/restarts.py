"""Whether a command that failed is started again."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from common.errors import EXIT_NODE_MISSING, EXIT_USER_ERROR
from pipeline.launchers.process import ProcessResult
from trainer.checkpoint.directory import CHECKPOINTS, whole_checkpoints

#: Restarts in a row without a new checkpoint before a training is given up.
MAX_RESTARTS = 3
#: Exit statuses of errors that a person has to fix first.
FINAL_STATUSES = (EXIT_USER_ERROR, 2, EXIT_NODE_MISSING)


@dataclass(frozen=True)
class Restarts:
    """The step of the last restart, and how many restarts in a row began there."""

    step: int = -1
    count: int = 0

    def at(self, step: int) -> Restarts:
        """After one more restart, from checkpoint `step`."""
        return Restarts(step, self.count + 1 if step == self.step else 1)

    @property
    def are_too_many(self) -> bool:
        return self.count > MAX_RESTARTS

    def record(self) -> dict[str, int]:
        return dataclasses.asdict(self)


class RestartPolicy(Protocol):
    """Decides on restarts in one run of a stage."""

    def may_restart(self, result: ProcessResult) -> bool:
        """Whether a command that failed with `result` is started again."""
        ...


class RestartAfterHang:
    """Restarts once, after a hang."""

    _hangs = 0

    def may_restart(self, result: ProcessResult) -> bool:
        self._hangs += result.hung
        return result.hung and self._hangs == 1


class RestartWhileProgressing:
    """Restarts after any crash or hang, until `MAX_RESTARTS` in a row have brought no new checkpoint."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._restarts = directory, Restarts()

    def may_restart(self, result: ProcessResult) -> bool:
        if result.status in FINAL_STATUSES:
            return False
        self._restarts = self._restarts.at(newest_checkpoint(self._directory))
        return not self._restarts.are_too_many


def checkpoint_steps(directory: Path) -> set[int]:
    """The global steps of the complete checkpoints in a training's directory, on its current branch."""
    return {step for step, _ in whole_checkpoints(directory / CHECKPOINTS)}


def newest_checkpoint(directory: Path) -> int:
    """The global step of the newest checkpoint; 0 if there is none."""
    return max(checkpoint_steps(directory), default=0)
