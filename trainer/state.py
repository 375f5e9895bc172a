"""All that resuming needs, besides the tensors, in one type."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from trainer.checkpoint.format import STATE
from trainer.data.order import ORDER_VERSION
from trainer.errors import CheckpointError


@dataclass(frozen=True)
class TrainState:
    """Where a run is, and what it must still be to go on from there."""

    phase: int
    #: Optimizer steps done in this phase.
    step: int
    #: Optimizer steps done in all phases.
    global_step: int
    #: Sequences seen in this phase.
    samples_consumed: int
    epoch: int
    seed: int
    global_batch_size: int
    #: `ShardSet.identity` of the data set.
    data: str
    order_version: int
    optimizer: str
    precision: str
    #: The fields of `ModelConfig`.
    model: dict[str, Any]
    #: Only said, never required: the layout and the versions it was trained with.
    data_parallel_size: int
    tensor_parallel_size: int
    micro_batch_size: int
    torch_version: str

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def read(cls, checkpoint: Path) -> Self:
        """The state in a checkpoint directory that was found valid."""
        record = json.loads((checkpoint / STATE).read_text())
        return cls(**record)

    def advanced(self, epoch: int) -> Self:
        """The state after one more step, which belonged to `epoch`."""
        return dataclasses.replace(
            self,
            step=self.step + 1,
            global_step=self.global_step + 1,
            samples_consumed=self.samples_consumed + self.global_batch_size,
            epoch=epoch,
        )

    def at(self, other: TrainState) -> Self:
        """This run at the place of `other`."""
        return dataclasses.replace(
            self,
            step=other.step,
            global_step=other.global_step,
            samples_consumed=other.samples_consumed,
            epoch=other.epoch,
        )

    def require_same_run(self, other: TrainState, checkpoint: Path) -> None:
        """Raise `CheckpointError` if this run cannot go on from `other`, the state in `checkpoint`."""
        self.require_same_model(other, checkpoint)
        for name in ("phase", "data", "seed", "global_batch_size", "order_version", "optimizer", "precision"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise CheckpointError(
                    f"{checkpoint} was trained with {name} = {theirs}, this run has {mine}: its samples or updates "
                    f"would not be the same; go on with {theirs}, or start anew in another output directory"
                )
        assert other.order_version == ORDER_VERSION

    def require_same_model(self, other: TrainState, checkpoint: Path) -> None:
        """Raise `CheckpointError` if `other` is the state of another model. Dropout may differ."""
        for name, mine in self.model.items():
            theirs = other.model.get(name)
            if mine != theirs and "dropout" not in name:
                raise CheckpointError(
                    f"{checkpoint} holds another model: its {name} is {theirs}, this run's is {mine}; "
                    f"give the model it was trained with, or another checkpoint"
                )
