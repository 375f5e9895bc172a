"""Stochastic rounding of fp32 to bf16: up or down with the probability that makes the expected value exact.

Gupta et al. 2015, arXiv:1502.02551, section 3; for bf16 weights Zamirai et al. 2020, arXiv:2010.06192. With rounding to
nearest, an update smaller than 2⁻⁹ of its weight is always lost.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: bf16 is the upper 16 bits of fp32.
_DROPPED_BITS = 16


def stochastically_rounded(x: Tensor, reinterpret: Callable[[Tensor, torch.dtype], Tensor]) -> Tensor:
    """Round `x` (fp32, any shape) to one of the two neighbouring bf16 values of each element; returned as fp32.

    Values representable in bf16 and non-finite values are unchanged. Draws from the default generator of `x`'s device.
    `reinterpret` casts bitwise to another dtype of the same size.
    """
    noise = torch.empty(x.shape, dtype=torch.int32, device=x.device).random_(0, 1 << _DROPPED_BITS)
    # Sign-magnitude format: adding to the bits adds to the magnitude and carries into the upper half.
    bits = (noise + reinterpret(x, torch.int32)) & -(1 << _DROPPED_BITS)
    # The carry could turn a NaN into a number.
    return torch.where(x.isfinite(), reinterpret(bits, torch.float32), x)
