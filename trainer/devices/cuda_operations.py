"""The model's operations on NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.errors import UserError
from trainer.devices.fused_operations import FusedOperations
from trainer.models.operations import AttentionMask

#: The number of words is filled up to a multiple of this.
_WORDS = 64


class CudaOperations(FusedOperations):
    """Attention over sequences without their padding, and what lies between the products in one pass over memory each,
    by the Triton kernels of `trainer.devices.kernels`. Where they cannot be used, attention by matrix products with a
    mask: torch's memory-efficient kernel, which torch would choose, adds up a query's gradient in whatever order its
    blocks finish, and a resumed run would end with other bytes (torch,
    aten/src/ATen/native/transformers/cuda/attention_backward.cu, num_splits_key)."""

    def __init__(self, *, has_triton: bool = False) -> None:
        """`has_triton`: whether this GPU and this installation have Triton."""
        super().__init__(Tensor.add_)
        self._kernels: Any = None
        if has_triton:
            from trainer.devices import kernels

            self._kernels = kernels

    @property
    def has_triton(self) -> bool:
        return self._kernels is not None

    def kernels_for(self, x: Tensor) -> Any:
        return self._kernels if x.dtype != torch.float64 and x.numel() > 0 else None

    def words_cross_entropy(self, x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
        """With words that never occur, up to a multiple of 64: of 30,522 words NVIDIA's libraries multiply with kernels
        of an older generation, which take three times as long."""
        others = -len(weight) % _WORDS
        weight, bias = F.pad(self.weight(weight), (0, 0, 0, others)), F.pad(bias, (0, others), value=float("-inf"))
        return self.cross_entropy(F.linear(x, weight, bias), labels)

    def projections(self, x: Tensor, layers: Sequence[nn.Linear]) -> Sequence[Tensor]:
        if torch.compiler.is_compiling():  # torch's compiler joins the conversions
            return super().projections(x, layers)
        return self.joined_projections(x, layers)

    def attention_mask(
        self, sequence_ids: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None = None
    ) -> AttentionMask:
        if not self.has_triton:
            return super().attention_mask(sequence_ids, cu_seqlens, max_seqlen)
        bounds = row_bounds(sequence_ids) if cu_seqlens is None else cu_seqlens
        lengths = bounds.diff()
        of_tokens = lengths.repeat_interleave(lengths, output_size=sequence_ids.numel())
        longest = max_seqlen or sequence_ids.shape[1]
        return Sequences(bounds.int(), of_tokens.int(), longest, sequence_ids, cu_seqlens)

    def self_attention(
        self, x: Tensor, layers: Sequence[nn.Linear], head_size: int, mask: AttentionMask, dropout_p: float
    ) -> Tensor:
        if not isinstance(mask, Sequences):
            return super().self_attention(x, layers, head_size, mask, dropout_p)
        kind = "cpu" if x.is_cpu else "cuda"
        is_converted = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
        of_products = torch.get_autocast_dtype(kind) if is_converted else x.dtype
        if not self._kernels.takes_heads(of_products, head_size):
            if mask.max_seqlen < x.shape[1]:  # without padding: a row, and so its mask, as long as a micro-batch
                name = str(of_products).removeprefix("torch.")
                raise UserError(
                    f"attention heads of dimension {head_size} in {name}; the kernels take at most "
                    f"{self._kernels.HEAD_SIZE_MAX}; use precision fp32, or a model with more heads"
                )
            dense = super().attention_mask(mask.sequence_ids, mask.packed_bounds)
            return super().self_attention(x, layers, head_size, dense, dropout_p)
        product, bias = self.joined_product(x, layers)
        qkv = product.flatten(0, 1)
        given = mask.bounds, mask.lengths, mask.max_seqlen
        out: Tensor = self._kernels.attention(qkv, bias, *given, qkv.shape[1] // 3 // head_size, dropout_p)
        return out.view(*x.shape[:2], -1)

    def attention(self, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, dropout_p: float) -> Tensor:
        return self.attention_by_products(query, key, value, mask, dropout_p)


class Sequences(NamedTuple):
    """What `CudaOperations.self_attention` is told about a micro-batch. Each token belongs to a sequence, a row's
    padding to one of its own: the kernels leave the results of other tokens undefined."""

    #: (R + 1,) and (T,) int32, as the kernel takes them.
    bounds: Tensor
    lengths: Tensor
    max_seqlen: int
    #: What the mask is made of where the kernel is not used.
    sequence_ids: Tensor
    packed_bounds: Tensor | None


def row_bounds(sequence_ids: Tensor) -> Tensor:
    """Where each row's sequence and its padding begin in the flattened micro-batch, and its end: (B, S), of rows that
    are not packed, → (2B + 1,). Computed on the rows' device: the host does not wait."""
    rows, seq_len = sequence_ids.shape
    lengths = sequence_ids.count_nonzero(1)
    return F.pad(torch.stack([lengths, seq_len - lengths], dim=1).flatten().cumsum(0), (1, 0))
