"""What the training loop asks of a device."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import torch

from trainer.models.bert import BertBatch
from trainer.models.operations import Operations


class Device(abc.ABC):
    """A kind of hardware, as the loop sees it."""

    #: What torch calls it.
    torch_device: torch.device
    #: The torch.distributed backend that reduces its tensors.
    backend: str
    #: How it does what devices do differently.
    operations: Operations = Operations()
    #: Whether a change of shape costs a compilation.
    static_shapes: bool = False

    @abc.abstractmethod
    def describe(self) -> str:
        """One line for the log: what it is and how much of it is used."""

    @abc.abstractmethod
    def automatic_precision(self) -> tuple[str, str]:
        """The precision that `auto` means here, and why."""

    def put(self, batch: BertBatch) -> BertBatch:
        """The batch on the device."""
        return batch.map(lambda tensor: tensor.to(self.torch_device, non_blocking=True))

    @abc.abstractmethod
    def seed(self, seed: int) -> None:
        """Seed what draws random numbers in the model."""

    def step_closure(self, f: Callable[..., Any], *tensors: torch.Tensor) -> None:
        """Call `f` with the tensors' values on the host, as soon as that costs no waiting; at once by default."""
        f(*(tensor.tolist() for tensor in tensors))

    def finish_closures(self) -> None:  # noqa: B027 (where closures never wait there is nothing to do)
        """Run the closures that still wait."""

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in the host's memory that later training does not change."""
        return tensor.detach().to("cpu", copy=True)

    @abc.abstractmethod
    def peak_flops_per_s(self, precision: str) -> float | None:
        """The hardware's published peak for that precision, or None where there is no such figure."""
