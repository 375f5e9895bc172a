"""Host copies of a run's state, from which checkpoints are written while training continues."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.checkpoint.format import MASTER
from trainer.state import TrainState


@dataclass(frozen=True)
class Snapshot:
    """A run's state in host memory: parameters and moments by name."""

    state: TrainState
    model: dict[str, Tensor]
    #: Empty in a minimal checkpoint.
    optimizer: dict[str, Tensor]

    def minimal(self) -> Snapshot:
        """The same without the optimizer: the master weights where they exist, else the model's."""
        weights = {name: self.optimizer.get(f"{MASTER}.{name}", tensor) for name, tensor in self.model.items()}
        return Snapshot(self.state, weights, {})


class HostCopy:
    """Host memory for one copy of a run's state, reused for every checkpoint.

    It is allocated at the start, not at the first save: too little memory fails before training, and no save waits for
    the kernel to allocate and zero the pages (seconds for BERT-Large).
    """

    def __init__(
        self,
        model: dict[str, Tensor],
        optimizer: dict[str, Tensor],
        allocate: Callable[[Tensor], Tensor],
        stored: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor,
    ) -> None:
        """`model`, `optimizer`: the live tensors, or tensors without data for what others keep; `allocate` returns a
        host tensor of the same shape and dtype; `stored` selects the part of a tensor that a checkpoint stores."""
        self._sources = (model, optimizer)
        self._stored = stored
        self._copies = tuple({name: allocate(t) for name, t in tensors.items()} for tensors in self._sources)

    def touch(self) -> None:
        """Write every page once, so that the kernel allocates it; not while a snapshot is in use."""
        for tensors in self._copies:
            for tensor in tensors.values():
                tensor.zero_()

    @torch.no_grad()
    def take(
        self,
        state: TrainState,
        copy: Callable[[list[Tensor], list[Tensor]], None],
        receive: Callable[[dict[str, Tensor]], None] = lambda copies: None,
    ) -> Snapshot:
        """Copy the current state; valid until the next call. `copy` copies the first list into the second, `receive`
        fills the copies of the optimizer's tensors that other workers keep."""
        for sources, copies in zip(self._sources, self._copies, strict=True):
            here = [name for name, tensor in sources.items() if not tensor.is_meta]
            copy([sources[name] for name in here], [copies[name] for name in here])
        receive(self._copies[1])
        kept = ({name: self._stored(name, copy) for name, copy in copies.items()} for copies in self._copies)
        return Snapshot(state, *kept)
