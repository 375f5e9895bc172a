"""A model's parameters and gradients, as the loop and the optimizers see them: a few lists of tensors.

`FlatParameters` puts them into long vectors, of which the model's tensors are views: zeroing, reducing, the norm,
clipping and the optimizer are then a few operations each, and no step copies anything. `SeparateParameters` keeps them
separate, for devices whose compiler turns every view of a long vector into a copy.

Gradients are summed in `Precision.dtype`. Where the weights have that type, autograd or a kernel adds to the sums;
elsewhere each parameter's gradient is added to its sum, and freed, as soon as it is computed.

E: extras, numbers (the losses) that are summed with the gradients in one all-reduce.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from trainer.optim.sharing import ALONE, Replicas, SharedModel
from trainer.precision import Precision


@dataclass(frozen=True)
class Group:
    """Tensors that an optimizer treats alike."""

    #: The model's weights, in `Precision.weights`.
    weights: list[Tensor]
    #: Their gradients' sums, in `Precision.dtype`.
    gradients: list[Tensor]
    has_weight_decay: bool
    #: Whether they are hidden weight matrices, for an optimizer that treats those in its own way.
    is_matrix: bool
    precision: Precision
    #: (name, view) of each parameter in tensors with this group's layout.
    named: Callable[[list[Tensor]], Iterator[tuple[str, Tensor]]]
    #: The weights in `Precision.dtype`, where it keeps them; else none.
    masters: list[Tensor] = field(default_factory=list)
    #: The context of rounding: split tensors draw this rank's own numbers, others the same ones on all ranks.
    random_region: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    @contextlib.contextmanager
    def opened(self) -> Iterator[list[Tensor]]:
        """The weights in `Precision.dtype`, to be updated in place; the model's are updated on exit."""
        # `to` returns the tensor itself if it has the type already: then nothing is copied, here or below.
        wide = self.masters or [weight.to(self.precision.dtype) for weight in self.weights]
        yield wide
        with self.random_region():
            for weight, updated in zip(self.weights, wide, strict=True):
                if weight is not updated:
                    weight.copy_(self.precision.rounded(updated))

    def zeros(self) -> list[Tensor]:
        """Zeros like the gradients, for an optimizer's state."""
        return [zeros_like(gradient) for gradient in self.gradients]


def named(groups: Sequence[Group], values: Sequence[list[Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Views, under the parameters' names and in their shapes, into tensors laid out like those of the groups."""
    for group, tensors in zip(groups, values, strict=True):
        yield from group.named(tensors)


def zeros_like(tensor: Tensor) -> Tensor:
    """Zeros copied from the host: created on a device that compiles, they would be one more graph."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype).to(tensor.device)


class Parameters(abc.ABC):
    """Created once the model is initialised on its device, in `Precision.dtype`; converts the weights' type."""

    groups: list[Group]
    #: Everything that is summed over the workers after a step and then zeroed.
    _reduced: list[Tensor]
    #: All gradients, in as few tensors as the layout has.
    _gradients: list[Tensor]
    #: (E,)
    _extras: Tensor
    #: What makes this worker's rounding differ from its replicas', if anything.
    rounding_seed: tuple[int, ...] = ()

    def __init__(
        self,
        model: nn.Module,
        has_weight_decay: Callable[[str], bool],
        extras: int,
        precision: Precision,
        shared: SharedModel | None = None,
        replicas: Replicas = ALONE,
        is_matrix: Callable[[str], bool] = lambda name: False,
    ) -> None:
        """`extras`: E. `shared`: the ranks that share the model; None: this worker holds all of it. `is_matrix`: which
        parameters form groups of their own, for Muon."""
        self.shared, self.replicas = shared, replicas
        self._is_matrix = is_matrix
        self.precision = precision
        self._parameters = dict(model.named_parameters())
        self._has_weight_decay = has_weight_decay
        #: Where the gradients are summed.
        self._homes: dict[str, Tensor] = {}
        self._lay_out(extras)

    @abc.abstractmethod
    def _lay_out(self, extras: int) -> None:
        """Allocate the gradient sums and the extras, and convert the weights to `Precision.weights`."""

    def _by_group(self) -> list[tuple[bool, bool, bool, list[str]]]:
        """(has weight decay, is split, is a matrix, names) of each group, in the model's order."""
        found: dict[tuple[bool, bool, bool], list[str]] = {}
        for name in self._parameters:
            is_split = self.shared is not None and self.shared.is_split(name)
            found.setdefault((self._has_weight_decay(name), is_split, self._is_matrix(name)), []).append(name)
        return [(*kind, found[kind]) for kind in sorted(found, reverse=True)]

    def _region(self, *, is_split: bool) -> Callable[[], contextlib.AbstractContextManager[None]]:
        return self.shared.random_region if is_split and self.shared is not None else contextlib.nullcontext

    @property
    def _sums_itself(self) -> bool:
        """Whether autograd's own gradient sums have the right type."""
        return self.precision.weights == self.precision.dtype

    def _sum_into(self, name: str, home: Tensor) -> None:
        """Have a parameter's gradients added to `home`; it has its final type already."""
        self._homes[name], parameter = home, self._parameters[name]
        if self._sums_itself:
            parameter.grad = home
        else:
            parameter.register_post_accumulate_grad_hook(lambda parameter: _move_gradient(parameter, home))

    def zero_gradients(self) -> None:
        """Zero the gradients and the extras."""
        for tensor in self._reduced:
            tensor.zero_()

    def add_extras(self, values: Tensor) -> None:
        """Add `values` (E,), which are summed over micro-steps and workers like gradients."""
        self._extras += values.to(self._extras.dtype)

    def reduce(
        self,
        all_reduce: Callable[[list[Tensor]], None],
        factor: float | Tensor | None = None,
        *,
        in_bf16: bool = False,
    ) -> Tensor:
        """Sum the gradients and extras over the workers, and multiply them by `factor`; returns the extras, (E,).
        `in_bf16`: send the gradients as bf16 numbers; the extras always keep their own type."""
        self.check_homes()
        if in_bf16:
            sent = [gradient.bfloat16() for gradient in self._gradients]
            all_reduce(sent)
            for gradient, total in zip(self._gradients, sent, strict=True):
                gradient.copy_(total)
            all_reduce([self._extras])
        else:
            all_reduce(self._reduced)
        return self._scaled(factor)

    def _scaled(self, factor: float | Tensor | None) -> Tensor:
        if factor is not None:
            for tensor in self._reduced:
                tensor.mul_(factor)
        return self._extras.clone()

    def check_homes(self) -> None:
        """Autograd adds in place unless .grad is replaced; a replaced one would silently not be reduced."""
        for name, parameter in self._parameters.items():
            assert parameter.grad is (self._homes[name] if self._sums_itself else None), name

    def clip(self, max_norm: float | Tensor | None) -> Tensor:
        """Scale the gradients down to the L2 norm `max_norm` if theirs is larger (None: never); returns the norm
        before clipping, that of the whole model even where ranks share it.

        Like `torch.nn.utils.clip_grad_norm_`, whose 1e-6 keeps the division finite.
        """
        norm = self._norm() if self.shared is None else self.shared.norm(self._homes)
        if max_norm is not None:
            factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
            for gradient in self._gradients:
                gradient.mul_(factor)
        return norm

    def _norm(self) -> Tensor:
        norms = [torch.linalg.vector_norm(gradient) for gradient in self._gradients]
        norm: Tensor = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
        return norm

    def exchange(self) -> None:  # noqa: B027 (workers that update all of them have nothing to send)
        """Bring all weights up to date with this update, where workers share its work."""

    def named(self, values: list[list[Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """`named` of all groups."""
        yield from named(self.groups, values)

    def masters(self) -> dict[str, Tensor]:
        """The weights in `Precision.dtype` that this worker updates, by name, in the model's order; {} if none."""
        if not self.precision.keeps_master:
            return {}
        views = dict(self.named([group.masters for group in self.groups]))
        return {name: views[name] for name in self._parameters if name in views}


def _move_gradient(parameter: Tensor, home: Tensor) -> None:
    assert parameter.grad is not None
    home.add_(parameter.grad)
    parameter.grad = None


class FlatParameters(Parameters):
    def _lay_out(self, extras: int) -> None:
        precision = self.precision
        total = sum(parameter.numel() for parameter in self._parameters.values())
        device = next(iter(self._parameters.values())).device
        weights = torch.empty(total, dtype=precision.weights, device=device)
        reduced = torch.zeros(total + extras, dtype=precision.dtype, device=device)
        self.groups = []
        at = 0
        for decays, is_split, is_matrix, together in self._by_group():
            placed = []
            for is_mine, names in self._shares(together):
                begin, places, masters = at, {}, list[Tensor]()
                if is_mine and precision.keeps_master:
                    numel = sum(self._parameters[name].numel() for name in names)
                    masters = [torch.empty(numel, dtype=precision.dtype, device=device)]
                for name in names:
                    parameter = self._parameters[name]
                    shape, place = parameter.shape, slice(at, at + parameter.numel())
                    at = place.stop
                    places[name] = slice(place.start - begin, place.stop - begin), shape
                    for whole, where in ((weights, place), *((master, places[name][0]) for master in masters)):
                        whole[where] = parameter.detach().reshape(-1)
                    parameter.data = weights[place].view(shape)
                    self._sum_into(name, reduced[place].view(shape))
                    parameter.gradient_sum = parameter.grad  # type: ignore[attr-defined]
                part = slice(begin, at)
                placed.append(weights[part])
                if is_mine and names:
                    self.groups.append(
                        Group(
                            [weights[part]], [reduced[part]], decays, is_matrix, precision, _views(places), masters,
                            self._region(is_split=is_split),
                        )
                    )  # fmt: skip
            self._place(placed)
        self._reduced, self._gradients, self._extras = [reduced], [reduced[:total]], reduced[total:]

    def _shares(self, names: list[str]) -> list[tuple[bool, list[str]]]:
        """Parts of a group, which lie together: (whether this worker updates it, its parameters)."""
        return [(True, names)]

    def _place(self, weights: list[Tensor]) -> None:
        """Called with the weights of a group: one tensor for each of its `_shares`."""


def _views(
    places: dict[str, tuple[slice, torch.Size]],
) -> Callable[[list[Tensor]], Iterator[tuple[str, Tensor]]]:
    """A function that yields the parameters' views into one long vector."""
    return lambda flat: ((name, flat[0][place].view(shape)) for name, (place, shape) in places.items())


class SeparateParameters(Parameters):
    def _lay_out(self, extras: int) -> None:
        precision = self.precision
        self._masters: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            if precision.weights != precision.dtype:
                value = parameter.detach().cpu()  # converted on a device that compiles, it would be one more graph
                if precision.keeps_master:
                    self._masters[name] = value.to(parameter.device, copy=True)
                parameter.data = value.to(precision.weights).to(parameter.device)
            self._sum_into(name, torch.zeros(parameter.shape, dtype=precision.dtype).to(parameter.device))
        example = next(iter(self._parameters.values()))
        self._extras = torch.zeros(extras, dtype=precision.dtype).to(example.device)
        self._settle()

    def _settle(self) -> None:
        """From here on, use the gradients that the parameters have now."""
        if self._sums_itself:
            self._homes = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        self._gradients = list(self._homes.values())
        self._reduced = [*self._gradients, self._extras]
        self.groups = [self._group(*kind) for kind in self._by_group()]

    def _group(self, decays: bool, is_split: bool, is_matrix: bool, names: list[str]) -> Group:
        return Group(
            [self._parameters[name] for name in names],
            [self._homes[name] for name in names],
            decays,
            is_matrix,
            self.precision,
            lambda tensors: zip(names, tensors, strict=True),
            [self._masters[name] for name in names if name in self._masters],
            self._region(is_split=is_split),
        )
