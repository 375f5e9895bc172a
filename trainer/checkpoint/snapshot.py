"""A state at rest: what a checkpoint is written from while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.checkpoint.format import MASTER
from trainer.state import TrainState


@dataclass(frozen=True)
class Snapshot:
    """A state in host memory: parameters and moments by name."""

    state: TrainState
    model: dict[str, Tensor]
    #: Empty in a minimal checkpoint.
    optimizer: dict[str, Tensor]

    def minimal(self) -> Snapshot:
        """The same without the optimizer: the best weights there are, under the model's names."""
        weights = {name: self.optimizer.get(f"{MASTER}.{name}", tensor) for name, tensor in self.model.items()}
        return Snapshot(self.state, weights, {})


class HostCopy:
    """Host memory for one copy of a run's state, used again for every checkpoint.

    It is claimed at the start rather than at the first save: a machine that is too small fails before it has trained,
    and no save waits for the kernel to hand out and clear the pages (seconds for BERT-Large).
    """

    def __init__(
        self,
        model: dict[str, Tensor],
        optimizer: dict[str, Tensor],
        allocate: Callable[[Tensor], Tensor],
        stored: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor,
    ) -> None:
        """`model`, `optimizer`: the tensors trained on; `allocate` makes host memory of a tensor's shape and dtype;
        `stored`: what of a tensor belongs into a checkpoint."""
        self._sources = (model, optimizer)
        self._stored = stored
        self._copies = tuple({name: allocate(t) for name, t in tensors.items()} for tensors in self._sources)

    def touch(self) -> None:
        """Write every page once; not while a snapshot is in use."""
        for tensors in self._copies:
            for tensor in tensors.values():
                tensor.zero_()

    @torch.no_grad()
    def take(self, state: TrainState, copy: Callable[[list[Tensor], list[Tensor]], None]) -> Snapshot:
        """The state as it is now; `copy` fills the second list from the first. It lives until the next call."""
        for sources, copies in zip(self._sources, self._copies, strict=True):
            copy(list(sources.values()), [copies[name] for name in sources])
        kept = ({name: self._stored(name, copy) for name, copy in copies.items()} for copies in self._copies)
        return Snapshot(state, *kept)
