"""The contents of an opened checkpoint of any format, before its shards are joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.checkpoint.interop.sources import Source
from trainer.models.config import ModelConfig
from trainer.state import TrainState

MODEL, OPTIMIZER = "model", "optimizer"
KINDS = (MODEL, OPTIMIZER)


@dataclass(frozen=True)
class Contents:
    """An opened checkpoint; its tensors are not loaded."""

    path: Path
    #: The format's name in `FORMATS`, and its variant.
    format: str
    form: str
    #: Global optimizer step; None if no file records it.
    step: int | None
    #: Parameters under our names, one source per tensor-parallel rank.
    model: Sequence[Source]
    #: `<moment>.<parameter>`, one source per rank; empty without optimizer state.
    optimizer: Sequence[Source] = ()
    #: Alias of a tensor that the files hold twice → its source on each rank.
    tied: dict[str, Sequence[Source]] = field(default_factory=dict)
    #: The model's config, if the files have it.
    config: ModelConfig | None = None
    #: Only in native checkpoints.
    state: TrainState | None = None
    epoch: int = 0
    #: State of a torch optimizer and schedule besides the moments: param_groups, scheduler, files (see `tutorial`).
    training: dict[str, Any] = field(default_factory=dict)
    #: File → its size in bytes.
    files: dict[Path, int] = field(default_factory=dict)

    @property
    def tensor_parallel_size(self) -> int:
        return len(self.model)

    def sources(self, kind: str) -> Sequence[Source]:
        return self.model if kind == MODEL else self.optimizer

    def close(self) -> None:
        for source in (*self.model, *self.optimizer, *(s for sources in self.tied.values() for s in sources)):
            source.close()
