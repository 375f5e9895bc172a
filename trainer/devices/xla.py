"""XLA through torch_xla: operations are recorded, and each step's graph is compiled once and run many times."""

from __future__ import annotations

import contextlib
import os
import queue
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Self

import torch

from common.errors import UserError
from trainer.data.loader import Step
from trainer.devices.base import Device, DeviceOptions
from trainer.devices.graphs import GraphReport
from trainer.optim.rounding import stochastically_rounded
from trainer.parallel.mesh import Group, Mesh

#: Bytes fetched at a time for a checkpoint; this much is in host memory twice.
_FETCHED_BYTES = 256 << 20


class XlaDevice(Device):
    """XLA on the CPU (`PJRT_DEVICE=CPU`), where workers reduce host copies through gloo."""

    compiles_steps = compiles_shapes = True
    backend = "gloo"

    def __init__(self, options: DeviceOptions) -> None:
        self._options = options
        self._graph_report = None
        if options.reports is not None:
            self._graph_report = GraphReport(options.reports, with_operations=options.count_operations)
        os.environ.setdefault("PJRT_DEVICE", "CPU")
        import torch_xla
        import torch_xla.core.xla_builder as xla_builder
        import torch_xla.core.xla_model as xm
        import torch_xla.core.xla_op_registry as op_registry
        import torch_xla.debug.metrics

        self._torch_xla, self._xm, self._metrics = torch_xla, xm, torch_xla.debug.metrics
        # torch's view(dtype) would fetch the tensor to the host.
        self._bitcast = {
            torch.int32: op_registry.register("int32_of_bits", lambda x: x.bitcast(xla_builder.Type.S32)),
            torch.float32: op_registry.register("float32_of_bits", lambda x: x.bitcast(xla_builder.Type.F32)),
        }
        self._late: list[tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = []

    @classmethod
    def of(cls, mesh: Mesh, options: DeviceOptions) -> Self:
        return cls(options)

    def start(self, mesh: Mesh) -> None:
        import torch_xla.runtime as xr

        self.torch_device = self._torch_xla.device()
        self.check_worlds(mesh, xr.world_size())

    @staticmethod
    def check_worlds(mesh: Mesh, world_size: int) -> None:
        """Raise `UserError` unless XLA's own `world_size` is the one that this device expects."""
        if world_size != 1:
            raise UserError(
                f"XLA on the CPU reduces through gloo and expects one XLA device per process, but sees {world_size} "
                f"(CPU_NUM_DEVICES?); start workers with torchrun or --spawn, which give each one device"
            )

    def describe(self) -> str:
        return f"xla on {self._xm.xla_device_hw(self.torch_device)}, {torch.__version__}/{self._torch_xla.__version__}"

    def automatic_precision(self) -> tuple[str, str]:
        return "fp32", "XLA on a CPU is for testing, and bf16 is no faster there"

    def feed(self, steps: Iterator[Step]) -> Iterator[Step]:
        """Moves micro-batches ahead of use in torch_xla's own loader threads; the loader ends the graph after every
        `batches_per_execution` of them."""
        from torch_xla.distributed.parallel_loader import MpDeviceLoader

        headers: queue.SimpleQueue[Step | None] = queue.SimpleQueue()
        failure: list[BaseException] = []

        def flattened() -> Iterator[dict[str, torch.Tensor]]:
            # Runs in a loader thread, which would swallow an error.
            try:
                for step in steps:
                    headers.put(step)
                    for batch in step.micro_batches:
                        yield vars(batch)
            except BaseException as error:
                failure.append(error)
            headers.put(None)

        loader = MpDeviceLoader(
            flattened(), self.torch_device, batches_per_execution=self._options.batches_per_execution
        )
        batches = iter(loader)
        try:
            while (step := headers.get()) is not None:
                micro_batches = list(step.micro_batches)
                kind = type(micro_batches[0])
                yield Step(**{**vars(step), "micro_batches": (kind(**b) for b in islice(batches, len(micro_batches)))})
            if failure:
                raise failure[0]
        finally:
            loader._parallel_loader.close()

    def compiled_graphs(self) -> int:
        return self._metrics.counter_value("UncachedCompile") or 0

    def graphs(self) -> list[dict[str, Any]]:
        _, _, samples = self._metrics.metric_data("CompileTime")
        return self._report.listed([nanoseconds / 1e9 for _, nanoseconds in samples])

    def graph_hashes(self) -> list[str]:
        return self._report.hashes()

    @property
    def _report(self) -> GraphReport:
        assert self._graph_report is not None, "only the worker with a report directory lists graphs"
        return self._graph_report

    def number(self, value: float, dtype: torch.dtype) -> torch.Tensor:
        # (1,) rather than (): torch_xla compiles the scalars 0 and 1 into the program.
        return torch.tensor([value], dtype=dtype).to(self.torch_device)

    def seed(self, seed: int) -> None:
        self._xm.set_rng_state(seed, str(self.torch_device))

    def round_stochastically(self, x: torch.Tensor) -> torch.Tensor:
        return stochastically_rounded(x, lambda tensor, dtype: self._bitcast[dtype](tensor))

    @contextlib.contextmanager
    def random_region(self, seed: int) -> Iterator[None]:
        device = str(self.torch_device)
        state = self._xm.get_rng_state(device)
        self._xm.set_rng_state(seed, device)
        yield
        self._xm.set_rng_state(state, device)

    def end_micro_steps(self) -> None:
        self._torch_xla.sync()

    def all_reduce(self, tensors: list[torch.Tensor], group: Group, *, sums: bool = True) -> None:
        if group.size == 1:
            return
        copies = self._fetch(tensors)
        flat = torch.cat([copy.reshape(-1) for copy in copies])
        super().all_reduce([flat], group, sums=sums)
        reduced = [part.view(c.shape) for part, c in zip(flat.split([c.numel() for c in copies]), copies, strict=True)]
        for tensor, total in zip(tensors, self._xm.send_cpu_data_to_device(reduced, self.torch_device), strict=True):
            tensor.copy_(total)

    def step_closure(self, f: Callable[..., Any], *tensors: torch.Tensor) -> None:
        """Called during the next step, when the values have been computed."""
        self._xm.add_step_closure(self._run_late)
        self._xm.add_step_closure(lambda *values: self._late.append((f, values)), args=tensors)

    def _run_late(self) -> None:
        late, self._late = self._late, []
        for f, tensors in late:
            f(*(tensor.tolist() for tensor in tensors))

    def finish_closures(self) -> None:
        self._torch_xla.sync()
        self._run_late()

    def copy_to_host(self, tensors: list[torch.Tensor], copies: list[torch.Tensor]) -> None:
        for part in buckets(tensors, _FETCHED_BYTES):
            for copy, fetched in zip(copies[part], self._fetch(tensors[part]), strict=True):
                copy.copy_(fetched)

    def summaries(self, tensors: list[torch.Tensor]) -> list[tuple[int, bool]]:
        # On the host: on the device this would be another graph.
        of_host = super().summaries
        return [one for part in buckets(tensors, _FETCHED_BYTES) for one in of_host(self._fetch(tensors[part]))]

    def _fetch(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Host copies, in one transfer."""
        self._torch_xla.sync()
        fetched: list[torch.Tensor] = self._torch_xla._XLAC._xla_get_cpu_tensors([t.detach() for t in tensors])
        return fetched

    def fallbacks(self) -> list[str]:
        # torch_xla counts each operation that it hands to the CPU under torch's name for it.
        return [name for name in self._metrics.counter_names() if name.startswith("aten::")]

    def peak_flops_per_s(self, precision: str) -> float | None:
        return None


def buckets(tensors: list[torch.Tensor], most_bytes: int) -> Iterator[slice]:
    """Slices of `tensors`, in order, of at most `most_bytes` or one tensor each."""
    start = total = 0
    for at, tensor in enumerate(tensors):
        size = tensor.numel() * tensor.element_size()
        if at > start and total + size > most_bytes:
            yield slice(start, at)
            start, total = at, 0
        total += size
    if tensors:
        yield slice(start, len(tensors))
