"""Stochastic rounding of fp32 to bf16: up or down with the probability that makes the expected value exact.

Gupta et al. 2015, arXiv:1502.02551, section 3; for bf16 weights Zamirai et al. 2020, arXiv:2010.06192. Rounded to the
nearest, an update smaller than 2⁻⁹ of its weight would be lost every time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: A bf16 is the upper half of an fp32.
_DROPPED_BITS = 16


def stochastically_rounded(x: Tensor, reinterpret: Callable[[Tensor, torch.dtype], Tensor]) -> Tensor:
    """fp32 values that bf16 holds exactly, each one of the two nearest to its element of `x` (fp32, any shape).

    What bf16 holds stays as it is, and what is not finite, too. Draws from the default generator of `x`'s device.
    `reinterpret` gives the same bits as another type of the same size.
    """
    noise = torch.empty(x.shape, dtype=torch.int32, device=x.device).random_(0, 1 << _DROPPED_BITS)
    # A sign and a magnitude: adding to the bits adds to the magnitude, and carries into the part that stays.
    bits = (noise + reinterpret(x, torch.int32)) & -(1 << _DROPPED_BITS)
    # A NaN's bits could carry into a number's.
    return torch.where(x.isfinite(), reinterpret(bits, torch.float32), x)
