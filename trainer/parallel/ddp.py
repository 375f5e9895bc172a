"""Adapts torch's DistributedDataParallel to the loop: gradients are summed during the backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from trainer.optim.parameters import SeparateParameters
from trainer.parallel.mesh import Group

#: DDP rebuilds its buckets, which moves the gradients, once: before its second reduction.
_STEPS_UNTIL_SETTLED = 2


class DdpParameters(SeparateParameters):
    """Parameters whose gradients DDP sums: in its buckets, or in our own sums where the dtypes differ."""

    _reductions = 0

    def reduce(
        self,
        all_reduce: Callable[[list[Tensor]], None],
        factor: float | Tensor | None = None,
        *,
        in_bf16: bool = False,
    ) -> Tensor:
        """Return the extras summed over the workers; DDP has summed the gradients. Both are multiplied by `factor`."""
        assert not in_bf16, "refused by TrainConfig"
        self._reductions += 1
        if not self._sums_itself:
            for parameter in self._parameters.values():
                parameter.grad = None  # DDP's bucket, which is empty
        elif self._reductions <= _STEPS_UNTIL_SETTLED:
            self._settle()
        self.check_homes()
        all_reduce([self._extras])
        return self._scaled(factor)

    def own_sums(self) -> dict[Tensor, Tensor] | None:
        """Parameter → our sum of its gradients; None if DDP's buckets hold the sums."""
        if self._sums_itself:
            return None
        return {parameter: self._homes[name] for name, parameter in self._parameters.items()}


class DdpModel:
    """The model's forward and backward pass under DDP, which sums over the workers in the last micro-step."""

    def __init__(self, model: nn.Module, group: Group, parameters: DdpParameters) -> None:
        self._ddp = DistributedDataParallel(
            model, process_group=group.process_group, broadcast_buffers=False, gradient_as_bucket_view=True
        )
        # DDP takes the mean over the workers; the loop expects sums.
        self._scale = group.size
        sums = parameters.own_sums()
        if sums is not None:
            # A lambda, because DDP refuses annotations that are strings, as they are here.
            self._ddp.register_comm_hook(None, lambda _, bucket: _sum_ours(sums, group, bucket))
            self._scale = 1

    def __call__(self, batch: object) -> tuple[Tensor, ...]:
        losses: tuple[Tensor, ...] = self._ddp(batch)
        return losses

    def backward(self, loss: Tensor) -> None:
        (loss * self._scale).backward()

    def micro_step(self, *, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """The context of a micro-step's forward and backward pass: no communication before the last one."""
        return contextlib.nullcontext() if is_last else self._ddp.no_sync()


def _sum_ours(sums: dict[Tensor, Tensor], group: Group, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's communication hook for a bucket whose gradients are ready: sum our gradients of its parameters."""
    ours = [sums[parameter] for parameter in bucket.parameters()]
    flat = torch.cat([tensor.reshape(-1) for tensor in ours])
    future = dist.all_reduce(flat, group=group.process_group, async_op=True).get_future()

    def put(_: torch.futures.Future[Tensor]) -> Tensor:
        for tensor, part in zip(ours, flat.split([tensor.numel() for tensor in ours]), strict=True):
            tensor.copy_(part.view(tensor.shape))
        buffer: Tensor = bucket.buffer()
        return buffer

    then: torch.futures.Future[Tensor] = future.then(put)
    return then
