"""AdamW with BERT's constants."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from trainer.optim.parameters import Parameters, zeros_like

#: beta1, beta2 of Devlin et al. 2018, appendix A.2; epsilon of google-research/bert's optimizer.
BETA1, BETA2 = 0.9, 0.999
EPSILON = 1e-6


class AdamW:
    """Loshchilov and Hutter, arXiv:1711.05101, as torch has it; decay on the first group only."""

    def __init__(
        self, parameters: Parameters, *, weight_decay: float, number: Callable[[float], float | Tensor] | None = None
    ) -> None:
        """`number` puts a number that changes from step to step on a device that compiles whole steps; None: the
        device runs torch's fused kernel."""
        self._parameters = parameters
        self._decay = [weight_decay if group.has_weight_decay else 0.0 for group in parameters.groups]
        self._number = number
        self._exp_avg, self._exp_avg_sq = (
            [[zeros_like(tensor) for tensor in group.tensors] for group in parameters.groups] for _ in range(2)
        )
        self._steps_done = 0

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Update the parameters from their gradients."""
        self._steps_done += 1
        update = self._fused if self._number is None else self._by_operations
        update(learning_rate)

    def _fused(self, learning_rate: float) -> None:
        # torch's function rather than its class, which imports the whole compiler when it is made (2 s).
        for group, weight_decay, exp_avg, exp_avg_sq in self._lists():
            adamw(
                group,
                [tensor.grad for tensor in group],  # type: ignore[misc]
                exp_avg,
                exp_avg_sq,
                [],
                # The kernel adds one to them.
                [torch.full((), self._steps_done - 1.0, device=tensor.device) for tensor in group],
                fused=True,
                amsgrad=False,
                beta1=BETA1,
                beta2=BETA2,
                lr=learning_rate,
                weight_decay=weight_decay,
                eps=EPSILON,
                maximize=False,
            )

    def _by_operations(self, learning_rate: float) -> None:
        assert self._number is not None
        step_size = self._number(learning_rate / (1 - BETA1**self._steps_done))
        correction = self._number((1 - BETA2**self._steps_done) ** -0.5)
        for group, weight_decay, exp_avg, exp_avg_sq in self._lists():
            keep = self._number(1 - learning_rate * weight_decay)
            for tensor, m, v in zip(group, exp_avg, exp_avg_sq, strict=True):
                assert tensor.grad is not None
                if weight_decay:
                    tensor.mul_(keep)
                m.mul_(BETA1).add_(tensor.grad, alpha=1 - BETA1)
                v.mul_(BETA2).addcmul_(tensor.grad, tensor.grad, value=1 - BETA2)
                tensor.sub_(step_size * m / (v.sqrt() * correction + EPSILON))

    def _lists(self) -> list[tuple[list[Tensor], float, list[Tensor], list[Tensor]]]:
        groups = [group.tensors for group in self._parameters.groups]
        return list(zip(groups, self._decay, self._exp_avg, self._exp_avg_sq, strict=True))

    def state(self) -> dict[str, Tensor]:
        """The moments by parameter, `exp_avg.<name>` and `exp_avg_sq.<name>`: views, which later steps change."""
        moments = {"exp_avg": self._exp_avg, "exp_avg_sq": self._exp_avg_sq}
        return {
            f"{moment}.{name}": view
            for moment, values in moments.items()
            for name, view in self._parameters.named(values)
        }

    def set_steps_done(self, steps: int) -> None:
        """How many updates the moments have seen: what the bias correction goes by."""
        self._steps_done = steps
