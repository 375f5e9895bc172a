"""A stand-in for AWS's native torch-neuronx: torch's device `neuron`, its process group and its compiler backend.

Its API is what is publicly known of the real one. Operations run on the CPU (device.cpp). The compiler runs graphs
operation by operation, and leaves a file for each in the cache that TORCH_NEURONX_NEFF_CACHE_DIR named when torch was
imported. What tests choose, by environment variables:

STANDIN_DRAWS_ON_HOST=1     random numbers come from the CPU's generator
STANDIN_STUCK_SEED=1        every seed starts the same random numbers
STANDIN_FALLBACKS=a,b       operations that are reported to have run on the CPU, if they ran at all
STANDIN_CORES=n             logical cores, 2 by default
STANDIN_NAME=trn3           the kind of chip
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from . import _device  # type: ignore[attr-defined]

_CORES = int(os.environ.get("STANDIN_CORES", "2"))
_STUCK = os.environ.get("STANDIN_STUCK_SEED") == "1"
#: Read once, as the real package does: later changes have no effect.
_CACHE = os.environ.get("TORCH_NEURONX_NEFF_CACHE_DIR", "/tmp/neuron-standin-cache")


def clear_op_tracking() -> None:
    _device.forget_called()


def get_fallback_ops() -> list[str]:
    reported = filter(None, os.environ.get("STANDIN_FALLBACKS", "").split(","))
    return sorted(set(reported) & set(_device.called()))


class _Properties:
    name = os.environ.get("STANDIN_NAME", "trn2")


def _in_a_group(use: Callable[..., Any]) -> Callable[..., Any]:
    """As AWS asks: a worker of several uses the device only when the process group is there."""

    def checked(*given: Any, **named: Any) -> Any:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
            raise RuntimeError("the device is used before the process group")
        return use(*given, **named)

    return checked


def _device_module() -> ModuleType:
    """`torch.neuron`."""

    def index_of(device: Any = None) -> int:
        if device is None:
            return int(_device.current_device())
        index = device if isinstance(device, int) else torch.device(device).index
        return int(_device.current_device()) if index is None else int(index)

    module = ModuleType("torch.neuron")
    everything: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": _in_a_group(lambda: _CORES),
        "current_device": lambda: int(_device.current_device()),
        "set_device": _in_a_group(lambda device: _device.set_device(index_of(device))),
        "get_device_name": _in_a_group(lambda device=None: _Properties.name),
        "get_device_properties": _in_a_group(lambda device=None: _Properties()),
        "manual_seed_all": lambda seed: [_device.seed(index, 0 if _STUCK else seed % 2**64) for index in range(_CORES)],
        "get_rng_state": lambda device=None: _device.get_state(index_of(device)),
        "set_rng_state": lambda state, device=None: _device.set_state(index_of(device), state),
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "memory_allocated": lambda device=None: _device.memory()[0],
        "max_memory_allocated": lambda device=None: _device.memory()[1],
        "reset_peak_memory_stats": lambda device=None: _device.reset_peak(),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
    }
    vars(module).update(everything)
    return module


class _Group(dist.ProcessGroup):
    """gloo on the host's view of the tensors; refuses tensors on the host, as NeuronLink would."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return "neuron"

    @staticmethod
    def _host(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        for tensor in tensors:
            if tensor.device.type != "neuron":
                raise RuntimeError(f"the backend neuron was given a tensor on {tensor.device}")
        return [_device.on_host(tensor.detach()) for tensor in tensors]

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        options = dist.AllreduceOptions()
        if opts is not None:
            options.reduceOp = opts.reduceOp
        return self._gloo.allreduce(self._host(tensors), options)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        return self._gloo.broadcast(self._host(tensors), opts)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Any:
        return self._gloo.allgather([self._host(each) for each in outputs], self._host(inputs))

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Any:
        return self._gloo._allgather_base(*self._host([output, given]))


def _compile(graph: torch.fx.GraphModule, inputs: list[torch.Tensor], *, options: dict[str, Any] | None = None) -> Any:
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    if options is not None:
        options["compiled"] = options.get("compiled", 0) + 1  # the real one changes it too
    shapes = [tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in inputs]

    def leave(part: str, traced: torch.fx.GraphModule, _: Any) -> Any:
        if any(not isinstance(extent, int) for shape in shapes if isinstance(shape, tuple) for extent in shape):
            raise RuntimeError("dynamic=True is not supported by the backend neuron")
        code = re.sub(r"device\(type='neuron', index=\d+\)", "neuron", traced.code)  # a NEFF runs on any core
        name = hashlib.sha256(f"{part}{code}{shapes}".encode()).hexdigest()[:20]
        module = Path(_CACHE) / f"MODULE_{name}"
        if not (module / "model.neff").exists():
            module.mkdir(parents=True, exist_ok=True)
            (module / "model.neff").write_text("compiled\n")
        return make_boxed_func(traced)

    return aot_autograd(
        fw_compiler=functools.partial(leave, "forward"), bw_compiler=functools.partial(leave, "backward")
    )(graph, inputs)


def _autoload() -> None:
    """Called by `import torch` (entry point torch.backends)."""


_device.start(_CORES, os.environ.get("STANDIN_DRAWS_ON_HOST") == "1")
torch.utils.rename_privateuse1_backend("neuron")
torch._register_device_module("neuron", _device_module())
torch.utils.generate_methods_for_privateuse1_backend()
sys.modules["torch.neuron"] = torch.neuron
dist.Backend.register_backend("neuron", _Group, devices=["neuron"])
