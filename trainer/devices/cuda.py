"""NVIDIA GPUs."""

from __future__ import annotations

import contextlib
import importlib.util
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, Self

import torch

from common.errors import UserError
from trainer.data.batch import B
from trainer.devices.base import Device, DeviceOptions
from trainer.devices.cuda_operations import CudaOperations
from trainer.parallel.mesh import Mesh
from trainer.precision import Precision

#: Dense bf16 tensor-core peaks, FLOP/s, by words in the name torch reports; None: not known. Data sheets often give
#: twice as much, with sparsity. Sources: nvidia.com/en-us/data-center/h100 (SXM, NVL, PCIe) and /h200 (SXM), as quoted
#: by other training programs; BFLOAT16 lines of the data sheets of L40 (181.05) and L40S (362.05).
_BF16_PEAKS: dict[str, float | None] = {
    "H200": 989e12, "H200 NVL": None, "H100": 989e12, "H100 NVL": 835e12, "H100 PCIe": 756e12, "A100": 312e12,
    "L40S": 362e12, "L40": 181e12, "L4": 121e12, "A10G": 70e12,
}  # fmt: skip


class CudaDevice(Device):
    operations: CudaOperations
    backend = "cpu:gloo,cuda:nccl"

    def __init__(self, local_rank: int) -> None:
        """Raises `UserError` if torch sees fewer than `local_rank` + 1 GPUs."""
        count = torch.cuda.device_count()
        if count == 0:
            raise UserError("torch sees no GPU; use --device cpu, or see to the driver and to a torch with CUDA")
        if local_rank >= count:
            raise UserError(
                f"worker {local_rank} of this machine asks for GPU {local_rank}, but torch sees {count}; "
                f"start at most {count} workers here, or use --device cpu"
            )
        self.torch_device = torch.device("cuda", local_rank)
        torch.cuda.set_device(self.torch_device)
        torch.backends.cuda.matmul.allow_tf32 = False
        self._no_triton = why_no_triton(torch.cuda.get_device_capability(self.torch_device))
        self.operations = self.compiled_operations = CudaOperations(has_triton=self._no_triton is None)
        self._waiting: list[tuple[Callable[..., Any], list[torch.Tensor], torch.cuda.Event]] = []

    @classmethod
    def of(cls, mesh: Mesh, options: DeviceOptions) -> Self:
        return cls(mesh.local_rank)

    def describe(self) -> str:
        slower = f"; without Triton kernels: {self._no_triton}" if self._no_triton else ""
        return f"cuda, {torch.cuda.get_device_name(self.torch_device)}{slower}"

    def automatic_precision(self) -> tuple[str, str]:
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "autocast", "this GPU has bf16 tensor cores"
        return "fp32", "this GPU has no bf16 tensor cores"

    def needs_no_padding(self, precision: Precision) -> bool:
        """If the kernels are used, and batches need not all have the same shapes."""
        return self.operations.has_triton and precision.products == torch.bfloat16 and not self.static_shapes

    def put(self, batch: B) -> B:
        """In one copy, which the host does not wait for."""
        return batch.in_one_buffer(lambda buffer: buffer.to(self.torch_device, non_blocking=True), pinned=True)

    def seed(self, seed: int) -> None:
        torch.cuda.manual_seed(seed)

    @contextlib.contextmanager
    def random_region(self, seed: int) -> Iterator[None]:
        state = torch.cuda.get_rng_state(self.torch_device)
        torch.cuda.manual_seed(seed)
        yield
        torch.cuda.set_rng_state(state, self.torch_device)

    def step_closure(self, f: Callable[..., Any], *tensors: torch.Tensor) -> None:
        """Called one step late, when the copies have arrived: no step waits for the GPU."""
        self.finish_closures()
        copies = [tensor.detach().to("cpu", non_blocking=True) for tensor in tensors]
        event = torch.cuda.Event()
        event.record()
        self._waiting.append((f, copies, event))

    def finish_closures(self) -> None:
        waiting, self._waiting = self._waiting, []
        for f, copies, event in waiting:
            event.synchronize()
            f(*(copy.tolist() for copy in copies))

    def host_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Pinned, so that copies run at full bus speed."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)

    def copy_to_host(self, tensors: list[torch.Tensor], copies: list[torch.Tensor]) -> None:
        for tensor, copy in zip(tensors, copies, strict=True):
            copy.copy_(tensor, non_blocking=True)
        torch.cuda.synchronize(self.torch_device)

    def peak_flops_per_s(self, precision: str) -> float | None:
        name = torch.cuda.get_device_name(self.torch_device)
        if precision in ("fp32", "fp64"):
            return None
        return bf16_peak(name)


def why_no_triton(capability: tuple[int, int]) -> str | None:
    """Why torch's own operations take the place of the Triton kernels; None: they do not."""
    if torch.version.hip is not None or capability < (8, 0):
        return "they are for NVIDIA GPUs of compute capability 8.0 or more"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    try:
        import_module("triton.runtime.driver").driver.active.get_current_target()
    except Exception as error:  # of a missing compiler or header, a folder that cannot be written, an old driver
        first = f"{type(error).__name__} {error}".splitlines()[0]
        return f"Triton cannot be used, see that there is a C compiler with Python's headers: {first}"
    return None


def bf16_peak(name: str) -> float | None:
    """The dense bf16 peak, FLOP/s, of the GPU that torch calls `name`; None: not known."""
    words = f" {' '.join(re.split('[ -]+', name))} "
    for model in sorted(_BF16_PEAKS, key=len, reverse=True):
        if f" {model} " in words:
            return _BF16_PEAKS[model]
    return None
