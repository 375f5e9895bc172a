"""The multi-layer perceptron of the Neuron tutorial: three linear layers, ReLU between them, log-softmax.

B: images in the micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.data.batch import Batch
from trainer.models.base import Model
from trainer.models.initial import InitialValues

PIXELS = 28 * 28
CLASSES = 10
HIDDEN = (120, 84)


@dataclass(frozen=True)
class ImageBatch(Batch):
    """One micro-batch of images."""

    #: (B, PIXELS) fp32, 0 … 1.
    images: Tensor
    #: (B,) int64, 0 … CLASSES - 1.
    labels: Tensor


class MLP(Model):
    """Parameters carry the tutorial's names."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(PIXELS, HIDDEN[0])
        self.fc2 = nn.Linear(HIDDEN[0], HIDDEN[1])
        self.fc3 = nn.Linear(HIDDEN[1], CLASSES)

    def log_probabilities(self, images: Tensor) -> Tensor:
        """(B, PIXELS) → (B, CLASSES), in fp32 at least."""
        x = F.relu(self.fc1(images.to(self.fc1.weight.dtype)))
        x = self.fc3(F.relu(self.fc2(x)))
        return F.log_softmax(x, dim=1, dtype=x.dtype if x.dtype == torch.float64 else torch.float32)

    def forward(self, batch: ImageBatch) -> tuple[Tensor]:
        """The summed negative log-likelihood in nats, a scalar."""
        return (F.nll_loss(self.log_probabilities(batch.images), batch.labels, reduction="sum"),)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """torch's initial values of a linear layer: uniform within ±1/√inputs, for weights and biases.

        Each tensor depends on (seed, its name) alone.
        """
        draw = InitialValues(seed)
        for name, parameter in self.named_parameters():
            inputs = getattr(self, name.split(".")[0]).in_features
            parameter.copy_(draw.uniform(name, tuple(parameter.shape), inputs**-0.5))
