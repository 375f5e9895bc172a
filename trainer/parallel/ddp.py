"""torch's DistributedDataParallel in the loop's terms: gradients are summed beside the backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer.optim.parameters import SeparateParameters
from trainer.parallel.mesh import Group

#: DDP puts its buckets, and with them the gradients, elsewhere once: before its second reduction.
_STEPS_UNTIL_SETTLED = 2


class DdpParameters(SeparateParameters):
    """Parameters whose gradients are views of DDP's buckets, and summed there."""

    def __init__(self, model: nn.Module, has_weight_decay: Callable[[str], bool], extras: int) -> None:
        super().__init__(model, has_weight_decay, extras)
        self._reductions = 0

    def reduce(self, all_reduce: Callable[[list[Tensor]], None]) -> Tensor:
        """The extras, summed over the workers; the gradients are already."""
        self._reductions += 1
        if self._reductions <= _STEPS_UNTIL_SETTLED:
            self._settle()
        self.check_homes()
        all_reduce([self._extras])
        return self._extras.clone()


class DdpModel:
    """A model's forward pass under DDP; the sum over the workers is part of the last micro-step's backward pass."""

    def __init__(self, model: nn.Module, group: Group) -> None:
        self._ddp = DistributedDataParallel(
            model, process_group=group.process_group, broadcast_buffers=False, gradient_as_bucket_view=True
        )
        self._workers = group.size

    def __call__(self, batch: object) -> tuple[Tensor, ...]:
        losses: tuple[Tensor, ...] = self._ddp(batch)
        return losses

    def backward(self, loss: Tensor) -> None:
        """DDP takes the mean over the workers, and ours are sums."""
        (loss * self._workers).backward()

    def micro_step(self, *, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """What forward and backward of a micro-step run in."""
        return contextlib.nullcontext() if is_last else self._ddp.no_sync()
