"""The operations of a model that devices do differently; these are torch's own, right everywhere."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


class Operations:
    """Handed to a model by its device. B: sequences, A: heads, S: tokens, D: head size."""

    def dropout(self, x: Tensor, p: float) -> Tensor:
        """Zero a share `p` of `x` and scale the rest by 1 / (1 - p)."""
        return F.dropout(x, p)

    def attention(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout_p: float) -> Tensor:
        """Scaled dot-product attention, (B, A, S, D) → (B, A, S, D); `mask` (B, 1, 1, S) bool, True: look there."""
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout_p)
