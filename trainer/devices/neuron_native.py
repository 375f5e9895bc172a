"""AWS Trainium as a device of torch's own, `neuron` (torch-neuronx from 2.13 on; trn2 and trn3).

It has not run on a NeuronCore: the whole chain runs on a stand-in for torch-neuronx (tests/standins/neuron_native), the
rest follows what is publicly known. What is known only from third parties is probed (`getattr`) at the start, and
`--self-test` compares what the device computes with the CPU.

Operations run one by one, or as graphs with `--compile`; either way, each new shape is compiled and kept in a cache.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import fx

from common.errors import UserError
from trainer.devices.base import Device, DeviceOptions
from trainer.devices.compiler import Compiler
from trainer.devices.neuron_host import raise_open_files
from trainer.devices.neuron_lane import NATIVE, Installation, peak_of, require_at_most_fp32, require_lane
from trainer.parallel.mesh import Mesh

#: Steps after which we look for operations that ran on the CPU: the optimizer's are known after the first.
_FALLBACK_STEPS = (1, 2, 10)


class NeuronCompiler(Compiler):
    """torch.compile with torch-neuronx's backend."""

    whole_graph = True

    def __init__(self) -> None:
        super().__init__()
        #: One object for all graphs, because the backend changes it. A graph that cannot be compiled is an error.
        self._options: dict[str, Any] = {"fallback_execution": False}

    def lower(self, graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        from torch._dynamo.backends.registry import lookup_backend

        backend: Callable[..., Callable[..., Any]] = lookup_backend("neuron")
        return backend(graph, inputs, options=self._options)


class NeuronNativeDevice(Device):
    """One logical NeuronCore per worker."""

    backend = "neuron"
    #: Eager operations are compiled, too.
    compiles_shapes = True

    def __init__(self, mesh: Mesh, options: DeviceOptions) -> None:
        """Does not use the device, since the process group must come first. Raises `UserError`."""
        self._lane = require_lane(Installation.of_machine(), NATIVE)
        self._open_files = raise_open_files()
        self._neuron: Any = torch.get_device_module("neuron")
        self.torch_device = torch.device("neuron", mesh.local_rank)
        self._allowed = options.allow_fallbacks
        self._steps = 0

    @classmethod
    def of(cls, mesh: Mesh, options: DeviceOptions) -> Self:
        return cls(mesh, options)

    def make_compiler(self, cache: str | None) -> Compiler:
        """The cache is the one that `trainer.launch.environment` set before torch was imported."""
        return NeuronCompiler()

    def start(self, mesh: Mesh) -> None:
        count = self._neuron.device_count()
        if mesh.local_rank >= count:
            raise UserError(
                f"worker {mesh.local_rank} of this machine asks for NeuronCore {mesh.local_rank}, but torch sees "
                f"{count}; start at most {count} workers here"
            )
        if set_device := getattr(self._neuron, "set_device", None):
            set_device(self.torch_device)
        if forget := _tracking("clear_op_tracking"):
            forget()

    def describe(self) -> str:
        caches = [f"{name}={os.environ[name]}" for name in sorted(os.environ) if name.startswith("TORCH_NEURONX_")]
        name = self._neuron.get_device_name(self.torch_device)
        found = f"{NATIVE}, since {self._lane}; {name}, {self._neuron.device_count()} cores"
        return "; ".join([found, *caches, self._open_files])

    def automatic_precision(self) -> tuple[str, str]:
        return "autocast", "NeuronCores multiply in bf16"

    def require_precision(self, name: str) -> None:
        super().require_precision(name)
        require_at_most_fp32(name, NATIVE)

    def loss_factors(self, counts: Sequence[int]) -> tuple[list[float], int]:
        """The gradients are divided by the first count: a third party saw wrong gradients where a loss was scaled by a
        number that is not a power of two before a compiled backward pass. A second loss is still scaled so, relative
        to the first: the self-test compares its gradients with the CPU's."""
        first, *others = [max(1, count) for count in counts]
        return [1.0, *(first / count for count in others)], first

    def number(self, value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(value, dtype=dtype).to(self.torch_device)

    def end_micro_steps(self) -> None:
        self._steps += 1
        if self._allowed is None or self._steps - 1 not in _FALLBACK_STEPS:
            return
        if refused := sorted(set(self.fallbacks() or ()) - set(self._allowed)):
            raise UserError(
                f"{', '.join(refused)} ran on the CPU instead of the NeuronCore, which is slow; if that is acceptable, "
                f"give --allow_fallbacks {','.join(refused)}"
            )

    def seed(self, seed: int) -> None:
        """Both generators, since dropout draws from the CPU's in some versions."""
        torch.default_generator.manual_seed(seed)
        self._neuron.manual_seed_all(seed)

    @contextlib.contextmanager
    def random_region(self, seed: int) -> Iterator[None]:
        host, device = torch.default_generator.get_state(), self._neuron.get_rng_state(self.torch_device)
        self.seed(seed)
        yield
        torch.default_generator.set_state(host)
        self._neuron.set_rng_state(device, self.torch_device)

    def summaries(self, tensors: list[torch.Tensor]) -> list[tuple[int, bool]]:
        # On the host: the device narrows int64 and fp64. One by one, so that the host holds one at a time.
        return [one for tensor in tensors for one in super(NeuronNativeDevice, self).summaries([tensor.cpu()])]

    def fallbacks(self) -> list[str] | None:
        found = _tracking("get_fallback_ops")
        return None if found is None else sorted(map(str, found()))

    def peak_flops_per_s(self, precision: str) -> float | None:
        return None if precision == "fp32" else peak_of(self._neuron.get_device_properties(self.torch_device).name)


def _tracking(name: str) -> Callable[[], Any] | None:
    """A function of torch_neuronx that only third parties have reported."""
    import torch_neuronx

    found: Callable[[], Any] | None = getattr(torch_neuronx, name, None)
    return found
