"""The base class of micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Self, TypeVar

import torch
from torch import Tensor

#: Tensors in one buffer begin at multiples of this many bytes: kernels load up to 16 bytes at once.
_ALIGNMENT = 64


@dataclass(frozen=True)
class Batch:
    """A dataclass whose fields are tensors on one device, None or numbers: the input of a model."""

    def map(self, f: Callable[[Tensor], Tensor]) -> Self:
        """The batch with `f` applied to each tensor."""
        return type(self)(
            **{name: f(value) if isinstance(value, Tensor) else value for name, value in vars(self).items()}
        )

    def without_padding(self) -> Batch:
        """The batch without the tokens that pad its rows, for a device that does not need rows; this one has none."""
        return self

    def in_one_buffer(self, move: Callable[[Tensor], Tensor], *, pinned: bool = False) -> Self:
        """The batch with all tensors in one buffer: `move` is called once, with its bytes on the host; the tensors are
        views of what it returns. `pinned`: pin its memory, so that a device can copy it while the host works."""
        tensors = [value for value in vars(self).values() if isinstance(value, Tensor)]
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        starts = list(accumulate((size + -size % _ALIGNMENT for size in sizes), initial=0))
        buffer = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=pinned)
        places = [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]
        for tensor, place in zip(tensors, places, strict=True):
            buffer[place].view(tensor.dtype).copy_(tensor.reshape(-1))
        moved, left = move(buffer), iter(places)
        return self.map(lambda tensor: moved[next(left)].view(tensor.dtype).view(tensor.shape))


#: One kind of batch.
B = TypeVar("B", bound=Batch)
