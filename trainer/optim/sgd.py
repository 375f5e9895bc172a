"""Stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trainer.optim.parameters import Parameters
from trainer.optim.select import Optimizer


class SGD(Optimizer):
    """Like torch's without momentum, so without state. Weight decay is an L2 penalty on the first group only."""

    state_form = ""

    def __init__(
        self, parameters: Parameters, *, weight_decay: float, number: Callable[[float], float | Tensor] | None = None
    ) -> None:
        """`number` moves a number that changes every step to a device that compiles whole steps."""
        self._parameters = parameters
        self._weight_decay = weight_decay
        self._number = number

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Update the parameters from their gradients."""
        rate = None if self._number is None else self._number(learning_rate)
        for group in self._parameters.groups:
            with group.opened() as weights:
                for weight, gradient in zip(weights, group.gradients, strict=True):
                    if group.has_weight_decay and self._weight_decay:
                        gradient = gradient.add(weight, alpha=self._weight_decay)
                    if rate is None:
                        weight.sub_(gradient, alpha=learning_rate)
                    else:
                        weight.sub_(rate * gradient)
