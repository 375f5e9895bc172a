"""What the training loop asks of a device."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from trainer.data.batch import B
from trainer.data.loader import Step
from trainer.devices.inductor import Inductor
from trainer.models.operations import Operations
from trainer.optim.rounding import stochastically_rounded
from trainer.parallel.mesh import Group, Mesh
from trainer.parallel.shared_memory import LEAST_BYTES

#: torch.distributed's name of what `Device.all_reduce` does, and what does it with two tensors.
_SUM = (dist.ReduceOp.SUM, torch.add)
_MAXIMUM = (dist.ReduceOp.MAX, torch.maximum)
#: Elements from which gloo reduces two halves at the same time: a fifth to a third faster (docs/decisions.md).
_LARGE = 1 << 20


@dataclass(frozen=True)
class DeviceOptions:
    """What a device can be told; most look at few of them."""

    precision: str = "auto"
    #: Micro-batches in one compiled graph.
    batches_per_execution: int = 1
    #: Directory for compiled graphs, where they can be kept; None: the compiler's own.
    compile_cache: str | None = None
    #: Directory for reports of what is compiled; None: no reports.
    reports: Path | None = None
    #: Whether the reports count operations.
    count_operations: bool = False
    #: Whether torch.compile is to be used.
    compile: bool = False
    #: Threads of the CPU that the work is worth, at most; None: all there are.
    threads: int | None = None
    #: Seed of stochastic rounding that the hardware does, the same on all workers, so that replicas stay alike.
    rounding_seed: int = 0


class Device(abc.ABC):
    """A kind of hardware, as the loop sees it."""

    #: What torch calls it.
    torch_device: torch.device
    #: The torch.distributed backend that reduces its tensors and, unless it is gloo, the host's.
    backend: str
    #: How it does what devices do differently.
    operations: Operations = Operations()
    #: Whether torch's DistributedDataParallel can reduce gradients between its workers.
    has_ddp: bool = True
    #: torch.compile, where it was asked for.
    inductor: Inductor | None = None
    #: Whether a change of shape, or of a number in the program, costs a compilation.
    compiles_steps: bool = False

    @classmethod
    def of(cls, mesh: Mesh, options: DeviceOptions) -> Self:
        """This worker's device. Raises `UserError`."""
        return cls()

    @property
    def static_shapes(self) -> bool:
        """Whether all micro-batches are to have the same shapes, so that one graph serves them."""
        return self.compiles_steps or self.inductor is not None

    def start(self, mesh: Mesh) -> None:  # noqa: B027 (most are ready when they are made)
        """Take the device into use, once the workers of `mesh` have met. Raises `UserError`."""

    @abc.abstractmethod
    def describe(self) -> str:
        """One line for the log: what it is and how much of it is used."""

    @abc.abstractmethod
    def automatic_precision(self) -> tuple[str, str]:
        """The precision that `auto` means here, and why."""

    def feed(self, steps: Iterator[Step]) -> Iterator[Step]:
        """The steps with their micro-batches on the device, each as late as it is asked for."""
        for step in steps:
            yield dataclasses.replace(step, micro_batches=map(self.put, step.micro_batches))

    def put(self, batch: B) -> B:
        """The batch on the device."""
        return batch.map(lambda tensor: tensor.to(self.torch_device, non_blocking=True))

    def compiled_graphs(self) -> int | None:
        """How many graphs this process has compiled; None on devices that compile nothing."""
        return None if self.inductor is None else len(self.inductor.graphs)

    def graphs(self) -> list[dict[str, Any]]:
        """The graphs compiled by this process: hash, operations, seconds; none where nothing is compiled."""
        return [] if self.inductor is None else self.inductor.graphs

    def graph_hashes(self) -> list[str]:
        """Of the graphs compiled by this process, in their order."""
        return [graph["hash"] for graph in self.graphs()]

    def number(self, value: float, dtype: torch.dtype) -> float | torch.Tensor:
        """A number that changes from step to step, as something that is no part of a compiled step; maybe (1,)."""
        return value

    def end_micro_steps(self) -> None:  # noqa: B027 (only lazy devices have anything to do)
        """All micro-steps of a step are done; what follows works on their sum."""

    def all_reduce(self, tensors: list[torch.Tensor], group: Group, *, sums: bool = True) -> None:
        """Sum each tensor (or, not `sums`, take the maximum) over the group, in place, in an order fixed by its size
        and the workers."""
        if group.size == 1:
            return
        process_group, shared_memory = group.links
        reduction, combine = _SUM if sums else _MAXIMUM
        under_way = []
        for tensor in tensors:
            if shared_memory is not None and tensor.nbytes >= LEAST_BYTES:
                shared_memory.all_reduce(tensor, combine)
            else:
                under_way += [
                    dist.all_reduce(piece, reduction, group=process_group, async_op=True) for piece in _pieces(tensor)
                ]
        for work in under_way:
            work.wait()

    @abc.abstractmethod
    def seed(self, seed: int) -> None:
        """Seed what draws random numbers in the model."""

    def round_stochastically(self, x: torch.Tensor) -> torch.Tensor:
        """fp32 rounded to values of bf16 by chance; seeded by `seed`, the same on all workers of one seed."""
        return stochastically_rounded(x, torch.Tensor.view)

    @abc.abstractmethod
    def random_region(self, seed: int) -> contextlib.AbstractContextManager[None]:
        """What is random inside is decided by `seed`, and what is random after goes on as if nothing had been."""

    def step_closure(self, f: Callable[..., Any], *tensors: torch.Tensor) -> None:
        """Call `f` with the tensors' values on the host, as soon as that costs no waiting; at once by default."""
        f(*(tensor.tolist() for tensor in tensors))

    def finish_closures(self) -> None:  # noqa: B027 (where closures never wait there is nothing to do)
        """Run the closures that still wait."""

    def host_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory of the host, of the tensor's shape and dtype, for copies from the device."""
        return torch.empty(tensor.shape, dtype=tensor.dtype)

    def copy_to_host(self, tensors: list[torch.Tensor], copies: list[torch.Tensor]) -> None:
        """Fill `copies`, made by `host_memory`; later training does not change them."""
        for tensor, copy in zip(tensors, copies, strict=True):
            copy.copy_(tensor)

    @torch.no_grad()
    def summaries(self, tensors: list[torch.Tensor]) -> list[tuple[int, bool]]:
        """Of each tensor: the sum of its bits as 64-bit words, which no single flipped bit leaves as it was, and
        whether all of it is finite."""
        filled = [tensor.detach().reshape(-1) for tensor in tensors if tensor.numel()]
        if not filled:
            return [(0, True)] * len(tensors)
        sums = torch.stack([_words(tensor).sum() for tensor in filled]).tolist()
        # Not isfinite, which makes a tensor of its own and takes twenty times as long.
        extremes = torch.stack([torch.stack(tensor.aminmax()).double() for tensor in filled])
        found = iter(zip(sums, extremes.isfinite().all(dim=1).tolist(), strict=True))
        return [next(found) if tensor.numel() else (0, True) for tensor in tensors]

    @abc.abstractmethod
    def peak_flops_per_s(self, precision: str) -> float | None:
        """The hardware's peak for that precision, as published or as measured here; None where neither is known."""


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a vector as int64, filled up with zeros; a copy only where they are not aligned."""
    size = tensor.element_size()
    if tensor.storage_offset() * size % 8 == 0 and tensor.numel() * size % 8 == 0:
        return tensor.view(torch.int64)
    return torch.nn.functional.pad(tensor, (0, -tensor.numel() % (8 // size))).clone().view(torch.int64)


def _pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What is reduced at once."""
    if tensor.device.type == "cpu" and tensor.numel() >= _LARGE:
        return tensor.view(-1).chunk(2)
    return (tensor,)
