"""A model's parameters and gradients as the loop and the optimizers see them: a few lists of tensors.

`FlatParameters` lays all of them into long vectors, of which the model's own are views: zeroing, reducing, the norm,
clipping and the optimizer are then each a few operations, and no step copies anything. `SeparateParameters` leaves
them apart, for devices whose compiler turns every view of a long vector into a copy of it.

N: number of parameters in all. E: extras, numbers (the losses) that are summed with the gradients, so that one
all-reduce serves both.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Group:
    """Tensors, each with its gradient in `.grad`, that an optimizer treats alike."""

    tensors: list[Tensor]
    has_weight_decay: bool


@dataclass(frozen=True)
class SharedGradients:
    """Ranks that share one model: some gradients are split over them, the others are the same on all."""

    is_split: Callable[[str], bool]
    #: Adds up a scalar over the ranks, in place.
    add_up: Callable[[Tensor], None]

    def norm(self, gradients: dict[str, Tensor]) -> Tensor:
        """The L2 norm of all gradients of the model, each once."""
        squares = {
            split: [torch.linalg.vector_norm(g) ** 2 for name, g in gradients.items() if self.is_split(name) is split]
            for split in (True, False)
        }
        split = torch.stack(squares[True]).sum()
        self.add_up(split)
        return (split + torch.stack(squares[False]).sum()).sqrt()


def zeros_like(tensor: Tensor) -> Tensor:
    """Zeros that come from the host: made on a device that compiles, they would be one more graph."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype).to(tensor.device)


class Parameters(abc.ABC):
    """Make it once the model is on its device, in its type, initialised."""

    groups: list[Group]
    #: Everything that is summed over the workers after a step, and then zeroed.
    _reduced: list[Tensor]
    #: All gradients, as few tensors as there are.
    _gradients: list[Tensor]
    #: (E,)
    _extras: Tensor

    def __init__(self, model: nn.Module) -> None:
        self._parameters = dict(model.named_parameters())
        self._homes: dict[str, Tensor] = {}

    def zero_gradients(self) -> None:
        """Zero the gradients and the extras, as they are at the start, too."""
        for tensor in self._reduced:
            tensor.zero_()

    def add_extras(self, values: Tensor) -> None:
        """Add `values` (E,), which are summed over micro-steps and workers like gradients."""
        self._extras += values.to(self._extras.dtype)

    def reduce(self, all_reduce: Callable[[list[Tensor]], None]) -> Tensor:
        """Sum the gradients and extras over the workers; returns the extras, (E,)."""
        self.check_homes()
        all_reduce(self._reduced)
        return self._extras.clone()

    def check_homes(self) -> None:
        """Autograd adds in place as long as nobody replaces .grad; a replaced one would silently not be reduced."""
        for name, parameter in self._parameters.items():
            assert parameter.grad is self._homes[name], name

    def clip(self, max_norm: float | Tensor | None, ranks: SharedGradients | None = None) -> Tensor:
        """Scale the gradients down to the L2 norm `max_norm` if theirs is larger (None: never); returns the norm
        before, which is that of the whole model where `ranks` share it.

        As `torch.nn.utils.clip_grad_norm_`, whose 1e-6 keeps the division finite.
        """
        norms = [torch.linalg.vector_norm(gradient) for gradient in self._gradients]
        norm: Tensor = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
        if ranks is not None:
            norm = ranks.norm(self._homes)
        if max_norm is not None:
            factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
            for gradient in self._gradients:
                gradient.mul_(factor)
        return norm

    @abc.abstractmethod
    def named(self, values: list[list[Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Views, under the parameters' names and in their shapes, into tensors laid out like those of the groups."""


class FlatParameters(Parameters):
    def __init__(self, model: nn.Module, has_weight_decay: Callable[[str], bool], extras: int) -> None:
        super().__init__(model)
        named = sorted(self._parameters.items(), key=lambda item: not has_weight_decay(item[0]))
        self._places: dict[str, tuple[slice, torch.Size]] = {}
        at = 0
        for name, parameter in named:
            self._places[name] = (slice(at, at + parameter.numel()), parameter.shape)
            at += parameter.numel()
        self._split = sum(p.numel() for name, p in named if has_weight_decay(name))
        example = named[0][1]
        flat = torch.empty(at, dtype=example.dtype, device=example.device)
        reduced = torch.zeros(at + extras, dtype=example.dtype, device=example.device)
        decayed, undecayed = nn.Parameter(flat[: self._split]), nn.Parameter(flat[self._split :])
        decayed.grad, undecayed.grad = reduced[: self._split], reduced[self._split : at]
        self.groups = [Group([decayed], True), Group([undecayed], False)]
        self._reduced, self._gradients, self._extras = [reduced], [reduced[:at]], reduced[at:]
        for name, parameter in named:
            place, shape = self._places[name]
            flat[place] = parameter.detach().reshape(-1)
            parameter.data = flat[place].view(shape)
            parameter.grad = self._homes[name] = reduced[place].view(shape)

    def named(self, values: list[list[Tensor]]) -> Iterator[tuple[str, Tensor]]:
        (decayed,), (undecayed,) = values
        for name, (place, shape) in self._places.items():
            above = slice(place.start - self._split, place.stop - self._split)
            yield name, (decayed[place] if place.stop <= self._split else undecayed[above]).view(shape)


class SeparateParameters(Parameters):
    def __init__(self, model: nn.Module, has_weight_decay: Callable[[str], bool], extras: int) -> None:
        super().__init__(model)
        for parameter in self._parameters.values():
            parameter.grad = zeros_like(parameter)
        decayed = [name for name in self._parameters if has_weight_decay(name)]
        self._names = [decayed, [name for name in self._parameters if name not in decayed]]
        self.groups = [
            Group([self._parameters[name] for name in names], decays)
            for names, decays in zip(self._names, (True, False), strict=True)
        ]
        example = next(iter(self._parameters.values()))
        self._extras = zeros_like(example.detach().flatten()[:extras])
        self._settle()

    def _settle(self) -> None:
        """From now on the gradients are those that the parameters have now."""
        self._homes = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        self._gradients = list(self._homes.values())
        self._reduced = [*self._gradients, self._extras]

    def named(self, values: list[list[Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for names, tensors in zip(self._names, values, strict=True):
            yield from zip(names, tensors, strict=True)
