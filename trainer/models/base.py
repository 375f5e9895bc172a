"""What the loop asks of a model."""

from __future__ import annotations

import abc
from typing import Any

from torch import Tensor, nn


class Model(nn.Module, abc.ABC):
    """A model that is trained on `trainer.data.batch.Batch`es of its own kind."""

    @abc.abstractmethod
    def forward(self, batch: Any) -> tuple[Tensor, ...]:
        """The losses: scalars, each a sum over what the reader of the batch counted."""

    @abc.abstractmethod
    def initialise(self, seed: int) -> None:
        """Set all parameters to initial values that depend on `seed` and their names alone."""
