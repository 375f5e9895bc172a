"""How often a training is started again: as long as it gets further."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import EXIT_NODE_MISSING, EXIT_USER_ERROR

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


def newest_checkpoint(directory: Path) -> int:
    """The global step of the newest checkpoint in a training's directory; 0 if there is none."""
    names = (path.name.removeprefix("ckpt_") for path in (directory / "checkpoints").glob("ckpt_*"))
    return max((int(name) for name in names if name.isdigit()), default=0)
