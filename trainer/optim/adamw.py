"""AdamW with BERT's constants."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from trainer.optim.buffers import ParameterBuffers

#: beta1, beta2 of Devlin et al. 2018, appendix A.2; epsilon of google-research/bert's optimizer.
BETAS = (0.9, 0.999)
EPSILON = 1e-6


class AdamW:
    """torch's fused AdamW (Loshchilov and Hutter, arXiv:1711.05101) over the flat buffers; decay on the first only.

    torch's function rather than its class, which imports the whole compiler when it is made (2 s).
    """

    def __init__(self, buffers: ParameterBuffers, *, weight_decay: float) -> None:
        self._buffers = buffers
        self._groups = ((buffers.decayed, weight_decay), (buffers.undecayed, 0.0))
        self._exp_avg, self._exp_avg_sq = ([torch.zeros_like(flat) for flat, _ in self._groups] for _ in range(2))
        self._steps = [torch.zeros((), dtype=torch.float32, device=flat.device) for flat, _ in self._groups]

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Update the parameters from the buffers' gradients."""
        for index, (flat, weight_decay) in enumerate(self._groups):
            assert flat.grad is not None
            adamw(
                [flat],
                [flat.grad],
                [self._exp_avg[index]],
                [self._exp_avg_sq[index]],
                [],
                [self._steps[index]],
                fused=True,
                amsgrad=False,
                beta1=BETAS[0],
                beta2=BETAS[1],
                lr=learning_rate,
                weight_decay=weight_decay,
                eps=EPSILON,
                maximize=False,
            )

    def state(self) -> dict[str, Tensor]:
        """The moments by parameter, `exp_avg.<name>` and `exp_avg_sq.<name>`: views, which later steps change."""
        moments = {"exp_avg": self._exp_avg, "exp_avg_sq": self._exp_avg_sq}
        return {
            f"{moment}.{name}": view for moment, flats in moments.items() for name, view in self._buffers.named(*flats)
        }

    def set_steps_done(self, steps: int) -> None:
        """How many updates the moments have seen: what the bias correction goes by."""
        for step in self._steps:
            step.fill_(steps)
