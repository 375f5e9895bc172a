"""LAMB: Adam's update with a learning rate per weight matrix, for very large batches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trainer.optim.adamw import BETA1, BETA2, EPSILON, MomentOptimizer, Moments
from trainer.optim.parameters import Group, Parameters

#: Largest trust ratio, ‖x‖ / ‖r + λx‖ (Fong et al. 2020, arXiv:2011.13584): no weight moves by more than the rate.
MAX_TRUST_RATIO = 1.0


class Lamb(MomentOptimizer):
    """You et al. 2019, arXiv:1904.00962, algorithm 2, with φ(z) = z and the trust ratio clipped to `MAX_TRUST_RATIO`.

    Parameters without weight decay (biases, LayerNorms) have trust ratio 1, as in timm's default. An update needs no
    other worker: the norms that tensor-parallel ranks add up are those of moments already updated.
    """

    def __init__(
        self, parameters: Parameters, *, weight_decay: float, number: Callable[[float], float | Tensor] | None = None
    ) -> None:
        """`number` moves a number that changes every step to a device that compiles whole steps."""
        self._shared = parameters.shared
        self._moments = Moments(parameters)
        self._weight_decay = weight_decay
        self._number = number or (lambda value: value)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Update the parameters from their gradients."""
        self._moments.steps_done += 1
        steps = self._moments.steps_done
        first, second = self._number(1 / (1 - BETA1**steps)), self._number((1 - BETA2**steps) ** -0.5)
        rate = self._number(learning_rate)
        for group, exp_avg, exp_avg_sq in self._moments.groups():
            with group.opened() as weights:
                updates = []
                for weight, gradient, m, v in zip(weights, group.gradients, exp_avg, exp_avg_sq, strict=True):
                    m.mul_(BETA1).add_(gradient, alpha=1 - BETA1)
                    v.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
                    update = m * first / (v.sqrt() * second + EPSILON)
                    if group.has_weight_decay:
                        update.add_(weight, alpha=self._weight_decay)
                    updates.append(update)
                if group.has_weight_decay:
                    self._adapt(group, weights, updates)
                for weight, update in zip(weights, updates, strict=True):
                    weight.sub_(update.mul_(rate))

    def _adapt(self, group: Group, weights: list[Tensor], updates: list[Tensor]) -> None:
        """Multiply the update of each parameter by its trust ratio; 1 where a norm is 0."""
        named = dict(group.named(updates))
        norms = torch.stack(
            [
                torch.stack([torch.linalg.vector_norm(tensor) for _, tensor in group.named(tensors)])
                for tensors in (weights, updates)
            ]
        )
        if self._shared is not None:
            norms = self._shared.whole_norms(list(named), norms)
        of_weights, of_updates = norms
        usable = (of_weights > 0) & (of_updates > 0)
        ratios = torch.where(usable, of_weights / torch.where(usable, of_updates, 1.0), 1.0).clamp(max=MAX_TRUST_RATIO)
        for update, ratio in zip(named.values(), ratios.unbind(), strict=True):
            update.mul_(ratio)
