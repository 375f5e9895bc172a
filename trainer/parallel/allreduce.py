"""A model's forward and backward pass where `Parameters.reduce` sums the gradients after the last micro-step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from torch import Tensor


class AllReduceModel:
    """The counterpart of `DdpModel` for `--data_parallel allreduce`."""

    def __init__(self, model: Callable[..., tuple[Tensor, ...]]) -> None:
        self._model = model

    def __call__(self, batch: object) -> tuple[Tensor, ...]:
        return self._model(batch)

    def backward(self, loss: Tensor) -> None:
        """Add this micro-step's gradients to those of the step."""
        loss.backward()

    def micro_step(self, *, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """The context of a micro-step's forward and backward pass."""
        return contextlib.nullcontext()
