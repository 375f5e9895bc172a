"""NVIDIA GPUs."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from common.errors import UserError
from trainer.data.batch import B
from trainer.devices.base import Device, DeviceOptions
from trainer.models.operations import AttentionMask, Operations
from trainer.parallel.mesh import Mesh

#: Dense bf16 tensor-core peaks, FLOP/s, by words of the name torch reports; None: not known. Data sheets often give
#: twice as much, with sparsity. Sources: nvidia.com/en-us/data-center/h100 (SXM, NVL, PCIe) and /h200 (SXM), as quoted
#: by other training programs; BFLOAT16 lines of the data sheets of L40 (181.05) and L40S (362.05).
_BF16_PEAKS: dict[str, float | None] = {
    "H200": 989e12, "H200 NVL": None, "H100": 989e12, "H100 NVL": 835e12, "H100 PCIe": 756e12, "A100": 312e12,
    "L40S": 362e12, "L40": 181e12, "L4": 121e12, "A10G": 70e12,
}  # fmt: skip


class CudaOperations(Operations):
    """Attends to packed rows as nested tensors, for which torch calls FlashAttention with variable lengths."""

    def attention_mask(self, sequence_ids: Tensor, cu_seqlens: Tensor | None) -> AttentionMask:
        if cu_seqlens is None or torch.compiler.is_compiling():
            return super().attention_mask(sequence_ids, cu_seqlens)
        # Printed once per process otherwise.
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype", UserWarning)
        return Bounds(cu_seqlens)

    def attention(self, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, dropout_p: float) -> Tensor:
        if not isinstance(mask, Bounds):
            return super().attention(query, key, value, mask, dropout_p)
        B, A, S, D = query.shape

        def nested(x: Tensor) -> Tensor:
            flat = x.transpose(1, 2).reshape(B * S, A, D)
            # Given minimum and maximum lengths, torch need not read them from the GPU, which would wait for it.
            jagged: Tensor = torch.nested.nested_tensor_from_jagged(flat, mask.tensor, min_seqlen=1, max_seqlen=S)
            return jagged.transpose(1, 2)

        out = F.scaled_dot_product_attention(nested(query), nested(key), nested(value), dropout_p=dropout_p)
        return out.transpose(1, 2).values().view(B, S, A, D).transpose(1, 2)


@dataclass(frozen=True)
class Bounds:
    """`cu_seqlens` of the flattened micro-batch, as `CudaOperations.attention` takes them."""

    tensor: Tensor


class CudaDevice(Device):
    operations = CudaOperations()
    backend = "cpu:gloo,cuda:nccl"

    def __init__(self, local_rank: int) -> None:
        """Raises `UserError` if torch sees fewer than `local_rank` + 1 GPUs."""
        count = torch.cuda.device_count()
        if local_rank >= count:
            raise UserError(
                f"worker {local_rank} of this machine asks for GPU {local_rank}, but torch sees {count}; "
                f"start at most {count} workers here, or use --device cpu"
            )
        self.torch_device = torch.device("cuda", local_rank)
        torch.cuda.set_device(self.torch_device)
        torch.backends.cuda.matmul.allow_tf32 = False
        self._waiting: list[tuple[Callable[..., Any], list[torch.Tensor], torch.cuda.Event]] = []

    @classmethod
    def of(cls, mesh: Mesh, options: DeviceOptions) -> Self:
        return cls(mesh.local_rank)

    def describe(self) -> str:
        return f"cuda, {torch.cuda.get_device_name(self.torch_device)}"

    def automatic_precision(self) -> tuple[str, str]:
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "autocast", "this GPU has bf16 tensor cores"
        return "fp32", "this GPU has no bf16 tensor cores"

    def put(self, batch: B) -> B:
        return super().put(batch.map(torch.Tensor.pin_memory))

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


def bf16_peak(name: str) -> float | None:
    """The dense bf16 peak, FLOP/s, of the GPU that torch calls `name`; None: not known."""
    words = f" {' '.join(re.split('[ -]+', name))} "
    for model in sorted(_BF16_PEAKS, key=len, reverse=True):
        if f" {model} " in words:
            return _BF16_PEAKS[model]
    return None
