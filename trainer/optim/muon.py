"""Muon: the momentum of each hidden weight matrix, orthogonalised; AdamW for all other parameters."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from trainer.optim.adamw import AdamW
from trainer.optim.parameters import Group, Parameters, named

#: Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon): momentum, and the quintic's coefficients and steps.
MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
_EPSILON = 1e-7


def orthogonalised(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Replace the singular values of each of `matrices` (L, rows, columns) by values of about 0.7 … 1.2.

    Newton-Schulz iteration in `dtype` (`torch.optim.Muon`'s is always bf16); a zero matrix stays zero.
    """
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = (x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=_EPSILON)).to(dtype)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon:
    """`torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"` (Liu et al. 2025, arXiv:2502.16982) for the groups of
    matrices, and AdamW at `adamw_lr_ratio` times the learning rate for the others.

    Data-parallel workers share the matrices of each shape: each orthogonalises some, and the updates are summed over
    the workers, with zeros for the others' matrices. Matrices that tensor-parallel ranks split are made whole first.
    """

    separates_matrices = True
    state_form = "momenta of the matrices, moments of the others"

    def __init__(
        self, parameters: Parameters, *, weight_decay: float, adamw_lr_ratio: float,
        number: Callable[[float], float | Tensor] | None = None,
    ) -> None:  # fmt: skip
        """`number` moves a number that changes every step to a device that compiles whole steps."""
        self._shared, self._replicas = parameters.shared, parameters.replicas
        self._weight_decay, self._adamw_lr_ratio = weight_decay, adamw_lr_ratio
        self._number = number or (lambda value: value)
        self._parameters = parameters
        self._dtype = parameters.precision.products
        self._buffers = [group.zeros() for group in self._groups]
        #: The update of each matrix, or of this rank's share of it, and the shape of the whole matrix.
        self._directions: dict[str, tuple[Tensor, torch.Size]] = {}
        self._adamw = AdamW(
            parameters, weight_decay=weight_decay, number=number, are_updated=lambda group: not group.is_matrix
        )

    @property
    def _groups(self) -> list[Group]:
        """Looked up each time, because DDP moves the gradients after its first step."""
        return [group for group in self._parameters.groups if group.is_matrix]

    @torch.no_grad()
    def prepare(self) -> None:
        """Orthogonalise the momenta, together with the other workers."""
        self._directions = self._orthogonalise(self._momenta())

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Update the parameters from their gradients, after `prepare`."""
        self._adamw.step(self._adamw_lr_ratio * learning_rate)
        rate = self._number(learning_rate)
        for group, buffers in zip(self._groups, self._buffers, strict=True):
            for gradient, buffer in zip(group.gradients, buffers, strict=True):
                buffer.lerp_(gradient, 1 - MOMENTUM)
            with group.opened() as weights:
                for name, weight in group.named(weights):
                    if group.has_weight_decay:
                        weight.mul_(1 - rate * self._weight_decay)
                    direction, (rows, columns) = self._directions[name]
                    weight.sub_(direction.to(weight.dtype) * (0.2 * math.sqrt(max(rows, columns)) * rate))
        self._directions.clear()

    def _momenta(self) -> dict[str, Tensor]:
        """Nesterov's momentum of each matrix, or of this rank's share of it, after this step."""
        found: dict[str, Tensor] = {}
        for group, buffers in zip(self._groups, self._buffers, strict=True):
            ahead = [
                torch.lerp(gradient, buffer.lerp(gradient, 1 - MOMENTUM), MOMENTUM)
                for gradient, buffer in zip(group.gradients, buffers, strict=True)
            ]
            found |= dict(group.named(ahead))
        return found

    def _orthogonalise(self, momenta: dict[str, Tensor]) -> dict[str, tuple[Tensor, torch.Size]]:
        """The update of each matrix, or of this rank's share of it, and the shape of the whole matrix."""
        whole = momenta if self._shared is None else self._shared.whole(momenta)
        by_shape: dict[torch.Size, list[str]] = {}
        for name, matrix in whole.items():
            by_shape.setdefault(matrix.shape, []).append(name)
        found: dict[str, tuple[Tensor, torch.Size]] = {}
        stacks = [torch.stack([whole[name] for name in names]) for names in by_shape.values()]
        shared = self._replicas.share(stacks, functools.partial(orthogonalised, dtype=self._dtype))
        for (shape, names), stack in zip(by_shape.items(), shared, strict=True):
            for name, matrix in zip(names, stack.unbind(), strict=True):
                mine = matrix if self._shared is None else self._shared.piece(name, matrix)
                found[name] = (mine, shape)
        return found

    def state(self) -> dict[str, Tensor]:
        """`momentum_buffer.<name>` of the matrices, AdamW's of the others: views, which later steps change."""
        buffers = {f"momentum_buffer.{name}": view for name, view in named(self._groups, self._buffers)}
        return self._adamw.state() | buffers

    def set_steps_done(self, steps: int) -> None:
        """Restore the number of updates, which AdamW's bias correction depends on."""
        self._adamw.set_steps_done(steps)
