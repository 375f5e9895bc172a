"""In which number types a model computes and is updated. The default does nothing.

name         weights  sums of gradients, moments, update
fp32         fp32     fp32
fp64         fp64     fp64: to check algorithms
autocast     fp32     fp32; products in bf16 where torch deems it safe
bf16-sr      bf16     fp32, then rounded up or down by chance (arXiv:2010.06192)
bf16-master  bf16     fp32, of an fp32 copy of the weights (arXiv:1710.03740)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Precision:
    """One of the names above."""

    name: str
    #: Rounds fp32 to values that bf16 has, by chance, without bias: what `bf16-sr` needs of a device.
    round_stochastically: Callable[[Tensor], Tensor] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of sums of gradients, of moments, and of weights while they are updated."""
        return torch.float64 if self.name == "fp64" else torch.float32

    @property
    def weights(self) -> torch.dtype:
        """Of the weights that the model computes with, and of their gradients in one micro-step."""
        return torch.bfloat16 if self.name.startswith("bf16-") else self.dtype

    @property
    def keeps_master(self) -> bool:
        """Whether weights are kept in `dtype`, too."""
        return self.name == "bf16-master"

    def rounded(self, weights: Tensor) -> Tensor:
        """Updated weights, in `dtype`, on their way to the model's, where a copy rounds them to the nearest."""
        if self.name != "bf16-sr":
            return weights
        assert self.round_stochastically is not None
        return self.round_stochastically(weights)

    def forward_context(self, device_type: str) -> contextlib.AbstractContextManager[object]:
        """What a forward pass runs in."""
        if self.name == "autocast":
            return torch.autocast(device_type, dtype=torch.bfloat16)
        return contextlib.nullcontext()
