"""In which number types a model computes. The default does nothing."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Precision:
    """`fp32`, `fp64` (to check algorithms), or `autocast`: fp32 weights, bf16 products where torch deems it safe."""

    name: str

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, gradients and moments."""
        return torch.float64 if self.name == "fp64" else torch.float32

    def forward_context(self, device_type: str) -> contextlib.AbstractContextManager[object]:
        """What a forward pass runs in."""
        if self.name == "autocast":
            return torch.autocast(device_type, dtype=torch.bfloat16)
        return contextlib.nullcontext()
