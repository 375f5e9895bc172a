"""Which optimizer a name means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from trainer import registry
from trainer.optim.parameters import Parameters


class Optimizer(Protocol):
    """What the loop asks of an optimizer. By default it has no state, and its updates need no other worker."""

    def prepare(self) -> None:
        """Do what needs other workers, before anything is changed: if one of them is lost, the state is still whole."""
        return

    def step(self, learning_rate: float) -> None:
        """Update the parameters from their gradients, after `prepare`."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Its tensors, by name; later steps change them. Checkpoints store them."""
        return {}

    def set_steps_done(self, steps: int) -> None:
        """Tell it how many updates the restored state has seen."""
        return


def separates_matrices(name: str) -> bool:
    """Whether the optimizer called `name` treats hidden weight matrices in its own way."""
    return bool(getattr(registry.load(registry.OPTIMIZERS[name]), "separates_matrices", False))


def takes_over(name: str, other: str) -> bool:
    """Whether the optimizer called `name` can go on with the state of the one called `other`: both keep the same, or
    the first keeps none."""
    return _state_form(name) in ("", _state_form(other))


def _state_form(name: str) -> str:
    """What its class says that the state consists of; without that, it is like no other's."""
    kind = registry.load(registry.OPTIMIZERS[name]) if name in registry.OPTIMIZERS else None
    return str(getattr(kind, "state_form", name))


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
