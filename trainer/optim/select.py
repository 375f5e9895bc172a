"""Which optimizer a name means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from trainer import registry
from trainer.optim.parameters import Parameters


class Optimizer(Protocol):
    """What the loop asks of an optimizer."""

    def prepare(self) -> None:
        """Do what needs other workers, before anything is changed: if one of them is lost, the state is still whole."""
        ...

    def step(self, learning_rate: float) -> None:
        """Update the parameters from their gradients, after `prepare`."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Its tensors, by name; later steps change them. Checkpoints store them."""
        ...

    def set_steps_done(self, steps: int) -> None:
        """Tell it how many updates the restored state has seen."""
        ...


def separates_matrices(name: str) -> bool:
    """Whether the optimizer called `name` treats hidden weight matrices in its own way."""
    return bool(getattr(registry.load(registry.OPTIMIZERS[name]), "separates_matrices", False))


def make_optimizer(
    name: str, parameters: Parameters, *, weight_decay: float, number: Callable[[float], float | Tensor] | None,
    adamw_lr_ratio: float = 1.0,
) -> Optimizer:  # fmt: skip
    """The optimizer called `name` in `trainer.registry`; `number` makes a tensor of a number that changes every step,
    on devices that compile whole steps, and is None elsewhere. `adamw_lr_ratio`: for one that treats hidden weight
    matrices in its own way, the learning rate of the other parameters divided by the matrices'."""
    own = {"adamw_lr_ratio": adamw_lr_ratio} if separates_matrices(name) else {}
    optimizer: Optimizer = registry.load(registry.OPTIMIZERS[name])(
        parameters, weight_decay=weight_decay, number=number, **own
    )
    return optimizer
