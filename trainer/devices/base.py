"""The interface between the training loop and a kind of hardware."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from common.errors import UserError
from trainer.data.batch import B
from trainer.data.loader import Step
from trainer.devices.compiler import Compiler
from trainer.devices.inductor import Inductor
from trainer.models.operations import Operations
from trainer.optim.rounding import stochastically_rounded
from trainer.parallel.mesh import Group, Mesh
from trainer.precision import Precision

#: From this many elements on, gloo reduces two halves concurrently: a fifth to a third faster (docs/decisions.md).
_LARGE = 1 << 20


@dataclass(frozen=True)
class DeviceOptions:
    """Options for devices; each device uses those that apply to it."""

    precision: str = "auto"
    #: Micro-batches in one compiled graph.
    batches_per_execution: int = 1
    #: Compile cache directory; None: the compiler's default.
    compile_cache: str | None = None
    #: Directory for reports on compiled graphs; None: no reports.
    reports: Path | None = None
    #: Whether the reports count operations.
    count_operations: bool = False
    #: Whether to use torch.compile.
    compile: bool = False
    #: How the workers train together, which not every device can.
    data_parallel: str = "allreduce"
    shard_optimizer: bool = False
    #: Operations that may run on the CPU instead, where the device would otherwise refuse to train; None: all.
    allow_fallbacks: tuple[str, ...] | None = ()
    #: Most CPU threads that the workload can use; None: no limit.
    threads: int | None = None
    #: Seed of stochastic rounding in hardware; the same on all workers, so that replicas stay equal.
    rounding_seed: int = 0


class Device(abc.ABC):
    """One kind of hardware."""

    torch_device: torch.device
    #: The torch.distributed backend; gloo alone where device tensors are host tensors.
    backend: str
    #: How the workers' process group finds its members, as `torch.distributed.init_process_group` takes it.
    init_method: str = "env://"
    #: The model operations that this device implements in its own way.
    operations: Operations = Operations()
    #: Those that replace them if torch.compile was requested: it fuses torch's own better than a device's.
    compiled_operations: Operations = Operations()
    #: Whether the state can be read after a collective has failed: no kernel waits for a lost worker.
    outlives_collectives: bool = False
    #: torch.compile, if it was requested.
    compiler: Compiler | None = None
    #: Whether whole steps are recorded and compiled.
    compiles_steps: bool = False
    #: Whether a new tensor shape, or a new constant in the program, triggers a compilation.
    compiles_shapes: bool = False

    @classmethod
    def of(cls, mesh: Mesh, options: DeviceOptions) -> Self:
        """This worker's device. Raises `UserError`."""
        return cls()

    def make_compiler(self, cache: str | None) -> Compiler:
        """What `--compile` compiles with; `cache`: directory for compiled code, None: the compiler's own.

        Raises `UserError` if it is not installed.
        """
        return Inductor(cache, for_cpu=self.backend == "gloo")

    @property
    def static_shapes(self) -> bool:
        """Whether all micro-batches need the same shapes, so that one graph serves them."""
        return self.compiles_shapes or self.compiler is not None

    def needs_no_padding(self, precision: Precision) -> bool:
        """Whether micro-batches come without the padding of their rows when training in that precision."""
        return False

    def start(self, mesh: Mesh) -> None:  # noqa: B027 (most are ready once constructed)
        """Initialise the device, after `mesh` has connected. Raises `UserError`."""

    @abc.abstractmethod
    def describe(self) -> str:
        """One line for the log: the hardware and how much of it is used."""

    @abc.abstractmethod
    def automatic_precision(self) -> tuple[str, str]:
        """The precision that `auto` selects, and why."""

    def resumes_exactly(self, precision: str) -> bool:
        """Whether a resumed run ends with the same bytes as an uninterrupted one."""
        return True

    def require_precision(self, name: str) -> None:
        """Raise `UserError` if this device does not compute in the precision `name`."""
        if name == "autocast-sr":
            raise UserError(
                "precision autocast-sr is for device neuron-xla, whose hardware rounds stochastically; use autocast, "
                "or bf16-sr, which rounds updates on every device"
            )

    def feed(self, steps: Iterator[Step]) -> Iterator[Step]:
        """The steps, each micro-batch moved to the device when it is requested."""
        for step in steps:
            yield dataclasses.replace(step, micro_batches=map(self.put, step.micro_batches))

    def put(self, batch: B) -> B:
        """The batch, moved to the device."""
        return batch.map(lambda tensor: tensor.to(self.torch_device, non_blocking=True))

    def compiled_graphs(self) -> int | None:
        """Number of graphs compiled by this process; None on devices that compile nothing."""
        return None if self.compiler is None else len(self.compiler.graphs)

    def graphs(self) -> list[dict[str, Any]]:
        """The graphs compiled by this process: hash, operations, seconds; empty if nothing is compiled."""
        return [] if self.compiler is None else self.compiler.graphs

    def graph_hashes(self) -> list[str]:
        """Hashes of the graphs compiled by this process, in order."""
        return [graph["hash"] for graph in self.graphs()]

    def loss_factors(self, counts: Sequence[int]) -> tuple[list[float], int]:
        """The factor of each loss before the backward pass, and what the gradients are divided by after their
        reduction; together they turn each loss, a sum, into a mean over its count in the global batch."""
        return [1 / max(1, count) for count in counts], 1

    def number(self, value: float, dtype: torch.dtype) -> float | torch.Tensor:
        """A value that changes every step, in a form that is not compiled into the graph as a constant; may be (1,)."""
        return value

    def end_micro_steps(self) -> None:  # noqa: B027 (only lazy devices have anything to do)
        """Called after the last micro-step of a step, before the gradients are reduced."""

    def all_reduce(self, tensors: list[torch.Tensor], group: Group, *, sums: bool = True) -> None:
        """Replace each tensor by its sum (`sums` False: its maximum) over the group; the order of additions depends
        only on the tensor's size and the number of workers."""
        if group.size == 1:
            return
        operation = dist.ReduceOp.SUM if sums else dist.ReduceOp.MAX
        pending = [
            dist.all_reduce(piece, operation, group=group.process_group, async_op=True)
            for tensor in tensors
            for piece in self._pieces(tensor)
        ]
        for work in pending:
            work.wait()

    def broadcast(self, tensors: list[tuple[torch.Tensor, int]], group: Group) -> None:
        """Replace each tensor by that of the group's worker whose number is given with it."""
        if group.size == 1:
            return
        pending = [
            dist.broadcast(tensor, group=group.process_group, group_src=owner, async_op=True)
            for tensor, owner in tensors
        ]
        for work in pending:
            work.wait()

    def _pieces(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The parts of a tensor that are reduced concurrently."""
        if self.backend == "gloo" and tensor.numel() >= _LARGE:
            return tensor.view(-1).chunk(2)
        return (tensor,)

    @abc.abstractmethod
    def seed(self, seed: int) -> None:
        """Seed the generator that the model draws from."""

    def round_stochastically(self, x: torch.Tensor) -> torch.Tensor:
        """fp32 rounded stochastically to bf16 values; workers with the same `seed` round alike."""
        return stochastically_rounded(x, torch.Tensor.view)

    @abc.abstractmethod
    def random_region(self, seed: int) -> contextlib.AbstractContextManager[None]:
        """A context whose random numbers come from `seed`; afterwards the generator has its former state."""

    def step_closure(self, f: Callable[..., Any], *tensors: torch.Tensor) -> None:
        """Call `f` with the tensors' values once they can be read without waiting; immediately by default."""
        f(*(tensor.tolist() for tensor in tensors))

    def finish_closures(self) -> None:  # noqa: B027 (nothing is pending by default)
        """Run all pending step closures."""

    def host_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Host memory of the tensor's shape and dtype, to copy into."""
        return torch.empty(tensor.shape, dtype=tensor.dtype)

    def copy_to_host(self, tensors: list[torch.Tensor], copies: list[torch.Tensor]) -> None:
        """Fill `copies`, made by `host_memory`; complete when this returns."""
        for tensor, copy in zip(tensors, copies, strict=True):
            copy.copy_(tensor)

    @torch.no_grad()
    def summaries(self, tensors: list[torch.Tensor]) -> list[tuple[int, bool]]:
        """For each tensor: the sum of its bytes as 64-bit words, which any single flipped bit changes, and whether all
        values are finite."""
        filled = [tensor.detach().reshape(-1) for tensor in tensors if tensor.numel()]
        if not filled:
            return [(0, True)] * len(tensors)
        sums = torch.stack([_words(tensor).sum() for tensor in filled]).tolist()
        # Not isfinite, which allocates a tensor and takes twenty times as long.
        extremes = torch.stack([torch.stack(tensor.aminmax()).double() for tensor in filled])
        found = iter(zip(sums, extremes.isfinite().all(dim=1).tolist(), strict=True))
        return [next(found) if tensor.numel() else (0, True) for tensor in tensors]

    def fallbacks(self) -> list[str] | None:
        """Names of the operations that have run on the CPU instead; None: not known."""
        return None

    @abc.abstractmethod
    def peak_flops_per_s(self, precision: str) -> float | None:
        """The hardware's peak at that precision, published or measured here; None: not known."""


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a vector as int64, zero-padded; copied only if they are not aligned."""
    size = tensor.element_size()
    if tensor.storage_offset() * size % 8 == 0 and tensor.numel() * size % 8 == 0:
        return tensor.view(torch.int64)
    return torch.nn.functional.pad(tensor, (0, -tensor.numel() % (8 // size))).clone().view(torch.int64)
