"""What opening a checkpoint finds, of whatever format: the same for all, before the shards are joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.checkpoint.interop.sources import Source
from trainer.config import ModelConfig
from trainer.state import TrainState

MODEL, OPTIMIZER = "model", "optimizer"
KINDS = (MODEL, OPTIMIZER)


@dataclass(frozen=True)
class Contents:
    """A checkpoint that was found, its tensors not loaded."""

    path: Path
    #: The format's name in `FORMATS`, and which of its forms this is.
    format: str
    form: str
    #: Global optimizer step; None where no file says it.
    step: int | None
    #: Parameters under our names, one source for each tensor-parallel rank.
    model: Sequence[Source]
    #: `<moment>.<parameter>`, likewise; none if the checkpoint has no optimizer state.
    optimizer: Sequence[Source] = ()
    #: Another name of a tensor that the files hold twice → ours: (rank's source of the other name) for each rank.
    tied: dict[str, Sequence[Source]] = field(default_factory=dict)
    #: What the files say of the model.
    config: ModelConfig | None = None
    #: Of native checkpoints.
    state: TrainState | None = None
    epoch: int = 0
    #: What a torch optimizer and schedule had beside their moments: param_groups, scheduler, files (see `tutorial`).
    training: dict[str, Any] = field(default_factory=dict)
    #: Files, with their sizes in bytes.
    files: dict[Path, int] = field(default_factory=dict)

    @property
    def tensor_parallel_size(self) -> int:
        return len(self.model)

    def sources(self, kind: str) -> Sequence[Source]:
        return self.model if kind == MODEL else self.optimizer

    def close(self) -> None:
        for source in (*self.model, *self.optimizer, *(s for sources in self.tied.values() for s in sources)):
            source.close()
