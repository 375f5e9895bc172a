"""AdamW with BERT's constants."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.optim.buffers import ParameterBuffers

#: beta1, beta2 of Devlin et al. 2018, appendix A.2; epsilon of google-research/bert's optimizer.
BETAS = (0.9, 0.999)
EPSILON = 1e-6


class AdamW:
    """torch's fused AdamW (Loshchilov and Hutter, arXiv:1711.05101) over the flat buffers; decay on the first only."""

    def __init__(self, buffers: ParameterBuffers, *, weight_decay: float) -> None:
        self._buffers = buffers
        self._flat = (buffers.decayed, buffers.undecayed)
        self._torch = torch.optim.AdamW(
            [
                {"params": [buffers.decayed], "weight_decay": weight_decay},
                {"params": [buffers.undecayed], "weight_decay": 0.0},
            ],
            lr=0.0,
            betas=BETAS,
            eps=EPSILON,
            fused=True,
        )
        for flat in self._flat:
            # What torch would make at the first step; made now so that a checkpoint can be read into it.
            self._torch.state[flat] = {
                "step": torch.zeros((), dtype=torch.float32, device=flat.device),
                "exp_avg": torch.zeros_like(flat),
                "exp_avg_sq": torch.zeros_like(flat),
            }

    def step(self, learning_rate: float) -> None:
        """Update the parameters from the buffers' gradients."""
        for group in self._torch.param_groups:
            group["lr"] = learning_rate
        self._torch.step()

    def state(self) -> dict[str, Tensor]:
        """The moments by parameter, `exp_avg.<name>` and `exp_avg_sq.<name>`: views, which later steps change."""
        first, second = (self._torch.state[flat] for flat in self._flat)
        return {
            f"{moment}.{name}": view
            for moment in ("exp_avg", "exp_avg_sq")
            for name, view in self._buffers.named(first[moment], second[moment])
        }

    def set_steps_done(self, steps: int) -> None:
        """How many updates the moments have seen: what the bias correction goes by."""
        for flat in self._flat:
            self._torch.state[flat]["step"].fill_(steps)
