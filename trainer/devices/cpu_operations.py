"""The model's operations on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.data.bert_batch import filled_up
from trainer.devices import cpu_kernels
from trainer.devices.cpu_kernels.attention import Group
from trainer.devices.fused_operations import FusedOperations
from trainer.models.operations import AttentionMask
from trainer.parallel.fp32_sums import gradient_sum
from trainer.parallel.tensor import VocabularyEmbedding


class CpuOperations(FusedOperations):
    """Torch's own or, where there is a C compiler, the kernels of `trainer.devices.cpu_kernels`. With them attention is
    torch's matrix products: the scores of one sequence fit into the caches."""

    def __init__(self) -> None:
        super().__init__(cpu_kernels.add_gradient)

    def kernels_for(self, x: Tensor) -> Any:
        if torch.compiler.is_compiling() or not x.numel() or cpu_kernels.library() is None:
            return None
        return cpu_kernels

    def embedding(self, ids: Tensor, table: VocabularyEmbedding) -> Tensor:
        is_summed = torch.is_grad_enabled() and gradient_sum(table.weight) is not None
        if table.is_split or not is_summed or (kernels := self.kernels_for(ids)) is None:
            return super().embedding(ids, table)
        rows: Tensor = kernels.embedding(ids, table.weight, table.padding_idx)
        return rows

    def dropout(self, x: Tensor, p: float) -> Tensor:
        if (kernels := self.kernels_for(x)) is None:
            return super().dropout(x, p)
        out: Tensor = kernels.dropout(x, p)
        return out

    def projections(self, x: Tensor, layers: Sequence[nn.Linear]) -> Sequence[Tensor]:
        return self.joined_projections(x, layers)

    def attention_mask(
        self, sequence_ids: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None = None
    ) -> AttentionMask:
        """With the kernels, a packed row's sequences one at a time, without those of padding: no scores between
        sequences are computed. Other rows all at once, with their padding."""
        if self.kernels_for(sequence_ids) is None:
            return super().attention_mask(sequence_ids, cu_seqlens)
        rows, seq_len = sequence_ids.shape
        if cu_seqlens is None:
            attended = sequence_ids.count_nonzero(1).clamp_(min=1).int()
            group, mask = Group(0, rows, seq_len, seq_len, attended), super().attention_mask(sequence_ids, None)
            return cpu_kernels.Sequences([group], rows * seq_len, mask)
        starts, lengths = cu_seqlens[:-1], cu_seqlens.diff()
        is_sequence = (lengths > 0) & (sequence_ids.flatten()[starts.clamp(max=rows * seq_len - 1)] > 0)
        starts, lengths = starts[is_sequence], lengths[is_sequence].int()
        groups = [
            Group(start, 1, length, filled_up(length), attended)
            for start, length, attended in zip(starts.tolist(), lengths.tolist(), lengths.split(1), strict=True)
        ]
        return cpu_kernels.Sequences(groups, rows * seq_len)

    def attention(self, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, dropout_p: float) -> Tensor:
        if dropout_p == 0 and query.dtype != torch.bfloat16:
            # In bf16 its backward pass takes three times as long as that of products.
            return super().attention(query, key, value, mask, dropout_p)
        return self.attention_by_products(query, key, value, mask, dropout_p)

    def self_attention(
        self, x: Tensor, layers: Sequence[nn.Linear], head_size: int, mask: AttentionMask, dropout_p: float
    ) -> Tensor:
        if not isinstance(mask, cpu_kernels.Sequences):
            return super().self_attention(x, layers, head_size, mask, dropout_p)
        is_narrow = x.dtype == torch.bfloat16 or torch.is_autocast_enabled("cpu")
        if mask.of_rows is not None and not dropout_p and not is_narrow:
            # torch's own kernel is as fast and keeps no scores.
            return super().self_attention(x, layers, head_size, mask.of_rows, 0.0)
        product, bias = self.joined_product(x, layers)
        qkv = product.flatten(0, 1)
        out = cpu_kernels.attention(qkv, bias, mask, qkv.shape[1] // 3 // head_size, dropout_p)
        return out.view(*x.shape[:2], -1)
