"""The base class of micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self, TypeVar

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """A dataclass whose fields are tensors on one device, or None: the input of a model."""

    def map(self, f: Callable[[Tensor], Tensor]) -> Self:
        """The batch with `f` applied to each tensor."""
        return type(self)(**{name: None if value is None else f(value) for name, value in vars(self).items()})


#: One kind of batch.
B = TypeVar("B", bound=Batch)
