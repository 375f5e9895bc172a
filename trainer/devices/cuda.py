"""NVIDIA GPUs."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.errors import UserError
from trainer.data.batch import B
from trainer.devices.base import Device, DeviceOptions
from trainer.models.operations import AttentionMask, Operations
from trainer.models.varlen_attention import (
    CAPABILITY,
    HEAD_SIZE_MAX,
    KERNEL_TYPES,
    head_size_max,
    takes,
    varlen_attention,
)
from trainer.parallel.mesh import Mesh
from trainer.precision import Precision

#: Dense bf16 tensor-core peaks, FLOP/s, by words in the name torch reports; None: not known. Data sheets often give
#: twice as much, with sparsity. Sources: nvidia.com/en-us/data-center/h100 (SXM, NVL, PCIe) and /h200 (SXM), as quoted
#: by other training programs; BFLOAT16 lines of the data sheets of L40 (181.05) and L40S (362.05).
_BF16_PEAKS: dict[str, float | None] = {
    "H200": 989e12, "H200 NVL": None, "H100": 989e12, "H100 NVL": 835e12, "H100 PCIe": 756e12, "A100": 312e12,
    "L40S": 362e12, "L40": 181e12, "L4": 121e12, "A10G": 70e12,
}  # fmt: skip


class CudaOperations(Operations):
    """Attention over rows, packed or not, by FlashAttention, which takes sequence lengths instead of a mask; in
    types that it does not support, by matrix products with a mask. Torch's memory-efficient kernel, which torch would
    choose with a mask, adds up a query's gradient in whatever order its blocks finish: a resumed run would end with
    other bytes (torch, aten/src/ATen/native/transformers/cuda/attention_backward.cu, num_splits_key)."""

    def __init__(self, *, has_flash: bool = True, head_size_max: int = HEAD_SIZE_MAX) -> None:
        """`has_flash`: whether this GPU and this build of torch have the kernels; `head_size_max`: the largest heads
        that they take with dropout."""
        self.has_flash, self.head_size_max = has_flash, head_size_max

    def projections(self, x: Tensor, layers: Sequence[nn.Linear]) -> Sequence[Tensor]:
        if torch.compiler.is_compiling():  # torch's compiler joins the conversions
            return super().projections(x, layers)
        return self.joined_projections(x, layers)

    def attention_mask(
        self, sequence_ids: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None = None
    ) -> AttentionMask:
        if not self.has_flash:
            return super().attention_mask(sequence_ids, cu_seqlens, max_seqlen)
        bounds = row_bounds(sequence_ids) if cu_seqlens is None else cu_seqlens
        return Sequences(bounds.int(), max_seqlen or sequence_ids.shape[1], sequence_ids, cu_seqlens)

    def attention(self, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, dropout_p: float) -> Tensor:
        if not isinstance(mask, Sequences):
            return self.attention_by_products(query, key, value, mask, dropout_p)
        most = self.head_size_max if dropout_p else HEAD_SIZE_MAX
        if not takes(query, most):
            if mask.max_seqlen < query.shape[2]:  # without padding: a row, and so its mask, as long as a micro-batch
                raise UserError(
                    f"attention heads of {query.shape[3]} numbers in {str(query.dtype).removeprefix('torch.')}; "
                    f"FlashAttention takes at most {most} on this GPU; use precision fp32, or a model with more heads"
                )
            dense = super().attention_mask(mask.sequence_ids, mask.packed_bounds)
            return self.attention_by_products(query, key, value, dense, dropout_p)
        B, A, S, D = query.shape
        q, k, v = (x.transpose(1, 2).reshape(B * S, A, D) for x in (query, key, value))
        out = varlen_attention(q, k, v, mask.cu_seqlens, mask.max_seqlen, dropout_p)
        return out.view(B, S, A, D).transpose(1, 2)


class Sequences(NamedTuple):
    """What `CudaOperations.attention` is told about a micro-batch. Each token belongs to a sequence, a row's padding
    to one of its own: the kernels leave the results of other tokens undefined."""

    #: (R + 1,) int32, as `varlen_attention` takes it.
    cu_seqlens: Tensor
    max_seqlen: int
    #: What the mask is made of where the kernels are not used.
    sequence_ids: Tensor
    packed_bounds: Tensor | None


def row_bounds(sequence_ids: Tensor) -> Tensor:
    """Where each row's sequence and its padding begin in the flattened micro-batch, and its end: (B, S), of rows that
    are not packed, → (2B + 1,). Computed on the rows' device: the host does not wait."""
    rows, seq_len = sequence_ids.shape
    lengths = sequence_ids.count_nonzero(1)
    return F.pad(torch.stack([lengths, seq_len - lengths], dim=1).flatten().cumsum(0), (1, 0))


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
        # AMD's build, a cuda device too, has other kernels behind the same operators.
        has_flash = torch.version.hip is None and torch.backends.cuda.is_flash_attention_available()
        capability = torch.cuda.get_device_capability(self.torch_device)
        self.operations = self.compiled_operations = CudaOperations(
            has_flash=has_flash and capability >= CAPABILITY, head_size_max=head_size_max(capability)
        )
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

    def needs_no_padding(self, precision: Precision) -> bool:
        """If the kernels are used, and batches need not all have the same shapes."""
        return self.operations.has_flash and precision.products in KERNEL_TYPES and not self.static_shapes

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


def bf16_peak(name: str) -> float | None:
    """The dense bf16 peak, FLOP/s, of the GPU that torch calls `name`; None: not known."""
    words = f" {' '.join(re.split('[ -]+', name))} "
    for model in sorted(_BF16_PEAKS, key=len, reverse=True):
        if f" {model} " in words:
            return _BF16_PEAKS[model]
    return None
