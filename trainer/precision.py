"""The number types that a model computes and is updated in.

name         weights  sums of gradients, moments, update
fp32         fp32     fp32
fp64         fp64     fp64, for checking algorithms
autocast     fp32     fp32; products in bf16 where torch considers it safe
autocast-sr  fp32     the same, and hardware rounds stochastically wherever fp32 becomes bf16
bf16-sr      bf16     fp32, then rounded stochastically (arXiv:2010.06192)
bf16-master  bf16     fp32, on an fp32 copy of the weights (arXiv:1710.03740)
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
    #: The device's unbiased stochastic rounding of fp32 to bf16 values, used by `bf16-sr`.
    round_stochastically: Callable[[Tensor], Tensor] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The type of gradient sums, moments, and weights during an update."""
        return torch.float64 if self.name == "fp64" else torch.float32

    @property
    def weights(self) -> torch.dtype:
        """The type of the weights that the model computes with, and of their gradients in one micro-step."""
        return torch.bfloat16 if self.name.startswith("bf16-") else self.dtype

    @property
    def products(self) -> torch.dtype:
        """The type in which an optimizer multiplies matrices. Hardware without bf16 products, for which `auto` means
        fp32, takes 20 to 100 times as long for them."""
        return self.dtype if self.name in ("fp32", "fp64") else torch.bfloat16

    @property
    def keeps_master(self) -> bool:
        """Whether a copy of the weights is kept in `dtype`."""
        return self.name == "bf16-master"

    def rounded(self, weights: Tensor) -> Tensor:
        """Updated weights, in `dtype`, before they are copied to the model's, which rounds to nearest."""
        if self.name != "bf16-sr":
            return weights
        assert self.round_stochastically is not None
        return self.round_stochastically(weights)

    def step_context(self, device_type: str) -> contextlib.AbstractContextManager[object]:
        """The context of a step's micro-steps: under autocast each weight that is used as it is, not joined with
        others, is converted once for all of them. (With kernels the CPU's operations convert encoder and decoder.)

        torch keeps converted weights until the outermost autocast context ends; by itself, that is one forward pass.
        """
        if self.name.startswith("autocast"):
            return torch.autocast(device_type, dtype=torch.bfloat16, enabled=False)
        return contextlib.nullcontext()

    def forward_context(self, device_type: str) -> contextlib.AbstractContextManager[object]:
        """The context of a forward pass."""
        if self.name.startswith("autocast"):
            return torch.autocast(device_type, dtype=torch.bfloat16)
        return contextlib.nullcontext()
