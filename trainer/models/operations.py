"""The operations of a model that devices do differently; these are torch's own, right everywhere."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

#: What `Operations.attention_mask` makes and `Operations.attention` of the same device reads.
AttentionMask = Any


class Operations:
    """Handed to a model by its device. B: rows, A: heads, S: tokens, D: head size."""

    def dropout(self, x: Tensor, p: float) -> Tensor:
        """Zero a share `p` of `x` and scale the rest by 1 / (1 - p)."""
        return F.dropout(x, p)

    def attention_mask(self, sequence_ids: Tensor, cu_seqlens: Tensor | None) -> AttentionMask:
        """Where attention may look, made once for all layers: at the tokens of the own sequence.

        `sequence_ids` (B, S) and, where rows are packed, `cu_seqlens` (R,) as in `BertBatch`; nobody reads the results
        of padding. Here bool, True: look there; (B, 1, 1, S), or (B, 1, S, S) where rows are packed. Padding looks at
        padding, so that no softmax is over nothing.
        """
        if cu_seqlens is None:
            return sequence_ids.bool()[:, None, None, :]
        return sequence_ids[:, None, :, None] == sequence_ids[:, None, None, :]

    def attention(self, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, dropout_p: float) -> Tensor:
        """Scaled dot-product attention, (B, A, S, D) → (B, A, S, D)."""
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout_p)
