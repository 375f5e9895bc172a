"""All parameters in two flat tensors (with and without weight decay), all gradients in one.

A model's parameters and gradients become views of these: zeroing, reducing, the norm, clipping and the optimizer are
then each a few operations on long vectors, and no step copies anything.

N: number of parameters in all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

#: Losses that travel behind the gradients, so that one all-reduce serves both.
EXTRAS = 2


class ParameterBuffers:
    """The flat home of `model`'s parameters. Make it once the model is on its device, in its type, initialised."""

    def __init__(self, model: nn.Module, has_weight_decay: Callable[[str], bool]) -> None:
        named = sorted(model.named_parameters(), key=lambda item: not has_weight_decay(item[0]))
        self._places: dict[str, tuple[slice, torch.Size]] = {}
        at = 0
        for name, parameter in named:
            self._places[name] = (slice(at, at + parameter.numel()), parameter.shape)
            at += parameter.numel()
        first_undecayed = sum(p.numel() for name, p in named if has_weight_decay(name))
        example = named[0][1]
        flat = torch.empty(at, dtype=example.dtype, device=example.device)
        self._gradients = torch.zeros(at + EXTRAS, dtype=example.dtype, device=example.device)
        self.decayed = nn.Parameter(flat[:first_undecayed])
        self.undecayed = nn.Parameter(flat[first_undecayed:])
        self.decayed.grad = self._gradients[:first_undecayed]
        self.undecayed.grad = self._gradients[first_undecayed:at]
        for name, parameter in named:
            place, shape = self._places[name]
            flat[place] = parameter.detach().reshape(-1)
            parameter.data = flat[place].view(shape)
            parameter.grad = self._gradients[place].view(shape)
        self._parameters = dict(named)

    def start_step(self) -> None:
        """Zero the gradients and the extras."""
        self._gradients.zero_()

    def add_extras(self, *values: Tensor) -> None:
        """Add scalars, which are summed over micro-steps and workers like gradients."""
        self._gradients[-EXTRAS:] += torch.stack(values).to(self._gradients.dtype)

    def reduce(self, all_reduce: Callable[[Tensor], None]) -> Tensor:
        """Sum the gradients and extras over the workers; returns the extras, (EXTRAS,)."""
        for name, parameter in self._parameters.items():
            place, _ = self._places[name]
            # Autograd adds in place as long as nobody replaces .grad; a replaced one would silently not be reduced.
            assert parameter.grad is not None, name
            assert parameter.grad.data_ptr() == self._gradients[place].data_ptr(), name
        all_reduce(self._gradients)
        return self._gradients[-EXTRAS:].clone()

    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients down to the L2 norm `max_norm` if theirs is larger (0: never); returns the norm before.

        As `torch.nn.utils.clip_grad_norm_`, whose 1e-6 keeps the division finite.
        """
        gradients = self._gradients[:-EXTRAS]
        norm: Tensor = torch.linalg.vector_norm(gradients)
        if max_norm > 0:
            gradients.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def named(self, decayed: Tensor, undecayed: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Views, under the parameters' names and in their shapes, into two tensors laid out like the buffers."""
        for name, (place, shape) in self._places.items():
            split = self.decayed.numel()
            piece = decayed[place] if place.stop <= split else undecayed[slice(place.start - split, place.stop - split)]
            yield name, piece.view(shape)
