"""The operations that devices implement differently. These are torch's own, correct on every device."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.data.bert_batch import IGNORED
from trainer.parallel.fp32_sums import at_least_fp32
from trainer.parallel.tensor import RowLinear, VocabularyEmbedding

#: Made by `Operations.attention_mask` for `Operations.self_attention` of the same device.
AttentionMask = Any


class Operations:
    """What a device provides to the model. B: rows, A: heads, S: tokens, D: head size."""

    def dropout(self, x: Tensor, p: float) -> Tensor:
        """Zero a share `p` of `x` and scale the rest by 1 / (1 - p)."""
        return F.dropout(x, p)

    def step_context(self) -> contextlib.AbstractContextManager[object]:
        """The context of a step's micro-steps, in which no weight changes."""
        return contextlib.nullcontext()

    def weight(self, *weights: Tensor) -> Tensor:
        """The weights of one layer or several, one below the other, as products take them."""
        return weights[0] if len(weights) == 1 else torch.cat(weights)

    def embedding(self, ids: Tensor, table: VocabularyEmbedding) -> Tensor:
        """The table's rows with these ids."""
        rows: Tensor = table(ids)
        return rows

    def dense_gelu(self, x: Tensor, dense: nn.Linear) -> Tensor:
        """gelu(dense(x))."""
        return F.gelu(dense(x))

    def dense_add_norm(
        self, x: Tensor, dense: RowLinear, residual: Tensor, norm: nn.LayerNorm, dropout_p: float
    ) -> tuple[Tensor, Tensor]:
        """norm(dropout(dense(x)) + residual), twice: for the next products, and as their residual. Devices may add up
        the gradients of both on their way."""
        product = dense(x)
        out: Tensor = norm((self.dropout(product, dropout_p) if dropout_p else product) + residual)
        return out, out

    def projections(self, x: Tensor, layers: Sequence[nn.Linear]) -> Sequence[Tensor]:
        """(…, H) → one (…, out) of each layer."""
        return [layer(x) for layer in layers]

    def joined_projections(self, x: Tensor, layers: Sequence[nn.Linear]) -> Sequence[Tensor]:
        """The same as one product, for which `x` is read, and under autocast converted, once; its gradient, too."""
        weight, bias = self.weight(*(layer.weight for layer in layers)), torch.cat([layer.bias for layer in layers])
        joined = F.linear(x, weight, bias)
        return torch.split(joined, [layer.out_features for layer in layers], dim=-1)

    def words_cross_entropy(self, x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
        """`cross_entropy` of the logits x · weightᵀ + bias; x (M, H), weight (V, H), bias (V,), labels (M,)."""
        return self.cross_entropy(F.linear(x, self.weight(weight), bias), labels)

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The sum of cross-entropies, in nats, of logits (M, V) and labels (M,), of which `IGNORED` are left out; in
        fp32 at least, whatever the logits' type."""
        return F.cross_entropy(at_least_fp32(logits), labels, ignore_index=IGNORED, reduction="sum")

    def attention_mask(
        self, sequence_ids: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None = None
    ) -> AttentionMask:
        """The attention mask of all layers: a token attends to its own sequence.

        `sequence_ids` (B, S) and, for packed rows, `cu_seqlens` (R,) as in `BertBatch`; `max_seqlen`: no sequence is
        longer (default: S). This one is bool, True where attention is allowed: (B, 1, 1, S), or (B, 1, S, S) for packed
        rows, in which padding attends to padding. Every row has tokens, so no softmax is empty; the results of padding
        are not used. Devices may take it that in a row that is not packed all tokens come before the padding.
        """
        if cu_seqlens is None:
            return sequence_ids.bool()[:, None, None, :]
        return sequence_ids[:, None, :, None] == sequence_ids[:, None, None, :]

    def self_attention(
        self, x: Tensor, layers: Sequence[nn.Linear], head_size: int, mask: AttentionMask, dropout_p: float
    ) -> Tensor:
        """Attention with queries, keys and values by three layers: (B, S, H) → (B, S, A · D)."""
        rows, length, _ = x.shape
        query, key, value = (
            projection.view(rows, length, -1, head_size).transpose(1, 2) for projection in self.projections(x, layers)
        )
        return self.attention(query, key, value, mask, dropout_p).transpose(1, 2).reshape(rows, length, -1)

    def attention(self, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, dropout_p: float) -> Tensor:
        """Scaled dot-product attention, (B, A, S, D) → (B, A, S, D)."""
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout_p)

    def attention_by_products(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout_p: float
    ) -> Tensor:
        """The same by matrix products, (B, A, S, S) numbers at a time, whose gradients are summed in a fixed order."""
        scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)
        # Half of the most negative number: adding a score to the number itself could overflow.
        bias = torch.zeros(mask.shape, dtype=scores.dtype, device=scores.device)
        bias.masked_fill_(~mask, torch.finfo(scores.dtype).min / 2)
        # dtype: autocast would convert to fp32 and back; the kernel computes in fp32 in any case.
        weights = torch.softmax(scores.add_(bias), dim=-1, dtype=scores.dtype)
        return (self.dropout(weights, dropout_p) if dropout_p else weights) @ value
