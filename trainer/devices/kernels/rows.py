"""How kernels that go through rows share them.

Each program handles several rows and sums their part of the gradients of biases and weights, so that the order of
additions is fixed by the GPU's size.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Of Philox4x32, as random bits are drawn: the fewest that pass BigCrush (Salmon et al. 2011, "Parallel random numbers:
#: as easy as 1, 2, 3"). Triton's default, 10, takes a third longer.
ROUNDS = tl.constexpr(7)
#: Programs for each multiprocessor.
_PROGRAMS = 8


def programs_for(x: Tensor, blocks: int = 1) -> int:
    """How many programs share the rows of `x` (N, H) if each row is handled in so many blocks."""
    return max(1, min(len(x), _PROGRAMS * _processors(x.device) // blocks))


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def block_of(columns: int) -> dict[str, int]:
    """A kernel's block of so many columns, 8 for each thread if there are enough."""
    size = max(8, int(triton.next_power_of_2(columns)))
    return {"BLOCK": size, "num_warps": min(16, max(1, size // 256))}
