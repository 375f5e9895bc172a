"""AdamW with BERT's constants."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from trainer.optim.parameters import Group, Parameters, named
from trainer.optim.select import Optimizer

#: beta1, beta2 of Devlin et al. 2018, appendix A.2; epsilon of google-research/bert's optimizer.
BETA1, BETA2 = 0.9, 0.999
EPSILON = 1e-6


class Moments:
    """Running means of the gradients and their squares, and the number of updates."""

    def __init__(self, parameters: Parameters, are_updated: Callable[[Group], bool] = lambda group: True) -> None:
        """Those of the groups that `are_updated`; all others have none."""
        self._parameters, self._are_updated = parameters, are_updated
        self.exp_avg, self.exp_avg_sq = ([group.zeros() for group in self._groups] for _ in range(2))
        self.steps_done = 0

    @property
    def _groups(self) -> list[Group]:
        """Looked up each time, because DDP moves the gradients after its first step."""
        return [group for group in self._parameters.groups if self._are_updated(group)]

    def groups(self) -> Sequence[tuple[Group, list[Tensor], list[Tensor]]]:
        """Each group with its two moments."""
        return list(zip(self._groups, self.exp_avg, self.exp_avg_sq, strict=True))

    def state(self) -> dict[str, Tensor]:
        """The moments by parameter, `exp_avg.<name>` and `exp_avg_sq.<name>`: views, which later steps change."""
        return {
            f"{moment}.{name}": view
            for moment, values in (("exp_avg", self.exp_avg), ("exp_avg_sq", self.exp_avg_sq))
            for name, view in named(self._groups, values)
        }


class MomentOptimizer(Optimizer):
    """Its state is `Moments`, and the bias correction depends on the number of updates."""

    state_form = "moments"
    _moments: Moments

    def state(self) -> dict[str, Tensor]:
        """The moments by parameter, `exp_avg.<name>` and `exp_avg_sq.<name>`: views, which later steps change."""
        return self._moments.state()

    def set_steps_done(self, steps: int) -> None:
        """Restore the number of updates."""
        self._moments.steps_done = steps


class AdamW(MomentOptimizer):
    """Loshchilov and Hutter, arXiv:1711.05101, as torch implements it; decay on the first group only."""

    def __init__(
        self,
        parameters: Parameters,
        *,
        weight_decay: float,
        number: Callable[[float], float | Tensor] | None = None,
        are_updated: Callable[[Group], bool] = lambda group: True,
    ) -> None:
        """`number` moves a number that changes every step to a device that compiles whole steps; None: the device
        runs torch's fused kernel. Only groups that `are_updated` are updated."""
        self._moments = Moments(parameters, are_updated)
        self._weight_decay = weight_decay
        self._number = number

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Update the parameters from their gradients."""
        self._moments.steps_done += 1
        update = self._fused if self._number is None else self._by_operations
        for group, exp_avg, exp_avg_sq in self._moments.groups():
            with group.opened() as weights:
                update(group, weights, exp_avg, exp_avg_sq, learning_rate)

    def _fused(
        self, group: Group, weights: list[Tensor], exp_avg: list[Tensor], exp_avg_sq: list[Tensor], learning_rate: float
    ) -> None:
        # torch's function, because creating its class imports the whole compiler (2 s).
        adamw(
            weights,
            group.gradients,
            exp_avg,
            exp_avg_sq,
            [],
            # The kernel adds one to them.
            [torch.full((), self._moments.steps_done - 1.0, device=weight.device) for weight in weights],
            fused=True,
            amsgrad=False,
            beta1=BETA1,
            beta2=BETA2,
            lr=learning_rate,
            weight_decay=self._weight_decay if group.has_weight_decay else 0.0,
            eps=EPSILON,
            maximize=False,
        )

    def _by_operations(
        self, group: Group, weights: list[Tensor], exp_avg: list[Tensor], exp_avg_sq: list[Tensor], learning_rate: float
    ) -> None:
        assert self._number is not None
        step_size = self._number(learning_rate / (1 - BETA1**self._moments.steps_done))
        correction = self._number((1 - BETA2**self._moments.steps_done) ** -0.5)
        keep = self._number(1 - learning_rate * self._weight_decay)
        for weight, gradient, m, v in zip(weights, group.gradients, exp_avg, exp_avg_sq, strict=True):
            if group.has_weight_decay and self._weight_decay:
                weight.mul_(keep)
            m.mul_(BETA1).add_(gradient, alpha=1 - BETA1)
            v.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
            weight.sub_(step_size * m / (v.sqrt() * correction + EPSILON))
