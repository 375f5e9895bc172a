"""Which optimizer a name means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from trainer.optim.adamw import AdamW
from trainer.optim.lamb import Lamb
from trainer.optim.parameters import Parameters
from trainer.optim.sgd import SGD


class Optimizer(Protocol):
    """What the loop asks of an optimizer."""

    def step(self, learning_rate: float) -> None:
        """Update the parameters from their gradients."""
        ...

    def state(self) -> dict[str, Tensor]:
        """What it remembers, by name; later steps change it."""
        ...

    def set_steps_done(self, steps: int) -> None:
        """How many updates its state has seen."""
        ...


def make_optimizer(
    name: str, parameters: Parameters, *, weight_decay: float, number: Callable[[float], float | Tensor] | None
) -> Optimizer:
    """The optimizer called `name`; `number`: for devices that compile whole steps, else None. Names that also choose a
    precision (`TrainConfig.wanted_precision`) are AdamW."""
    kinds: dict[str, type[SGD | Lamb | AdamW]] = {"LAMB": Lamb, "SGD": SGD}
    return kinds.get(name, AdamW)(parameters, weight_decay=weight_decay, number=number)
