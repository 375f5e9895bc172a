"""LayerNorm and embeddings whose weight gradients are summed over tokens in fp32 when the weights are bf16.

torch's CPU kernels sum such gradients in bf16, where small addends are lost beside a large sum: gradients of LayerNorms
and segment embeddings were off by up to 18 % (docs/decisions.md). On other devices fp32 costs little.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which numbers of this type are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def at_least_fp32(x: Tensor) -> Tensor:
    return x.to(wide(x.dtype))


def gradient_sum(parameter: Tensor) -> Tensor | None:
    """Where the gradients of a step are summed, if a kernel may add to it without autograd: in `FlatParameters`, if
    weights and sums have one type. Else None."""
    return getattr(parameter, "gradient_sum", None)


class LayerNorm(nn.LayerNorm):
    """torch's LayerNorm; with bf16 weights it computes in fp32 and returns bf16."""

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dtype != torch.bfloat16:
            return super().forward(x)
        out = F.layer_norm(x.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps)
        return out.to(self.weight.dtype)


class Embedding(nn.Embedding):
    """torch's Embedding; the gradient of bf16 weights is summed in fp32."""

    def forward(self, ids: Tensor) -> Tensor:
        rows = F.embedding(ids, at_least_fp32(self.weight), self.padding_idx)
        return rows.to(self.weight.dtype)
