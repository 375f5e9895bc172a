"""Operations on devices with kernels of our own for what lies between the matrix products."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.data.bert_batch import IGNORED
from trainer.devices.narrow_weights import NarrowWeights
from trainer.models.operations import Operations
from trainer.parallel.tensor import RowLinear


class FusedOperations(Operations):
    """What lies between the products in one pass over memory each. The results have the products' type, so that under
    autocast nothing between them is fp32."""

    def __init__(self, add: Callable[[Tensor, Tensor], object]) -> None:
        """`add`: adds to a sum in fp32 a gradient of another type."""
        self.narrow_weights = NarrowWeights(add)

    def kernels_for(self, x: Tensor) -> Any:
        """The module with the kernels; None for torch's operations."""
        raise NotImplementedError

    def step_context(self) -> contextlib.AbstractContextManager[object]:
        return self.narrow_weights.kept()

    def weight(self, *weights: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or self.kernels_for(weights[0]) is None:
            return super().weight(*weights)
        narrow = self.narrow_weights.of(*weights)
        return super().weight(*weights) if narrow is None else narrow

    def dense_gelu(self, x: Tensor, dense: nn.Linear) -> Tensor:
        if (kernels := self.kernels_for(x)) is None:
            return super().dense_gelu(x, dense)
        out: Tensor = kernels.bias_gelu(F.linear(x, self.weight(dense.weight)), dense.bias)
        return out

    def dense_add_norm(
        self, x: Tensor, dense: RowLinear, residual: Tensor, norm: nn.LayerNorm, dropout_p: float
    ) -> tuple[Tensor, Tensor]:
        if (kernels := self.kernels_for(x)) is None:
            return super().dense_add_norm(x, dense, residual, norm, dropout_p)
        product = dense.product(x, weight=self.weight(dense.weight))
        both: tuple[Tensor, Tensor] = kernels.bias_dropout_add_norm(product, dense.bias, residual, norm, dropout_p)
        return both

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        if (kernels := self.kernels_for(logits)) is None:
            return super().cross_entropy(logits, labels)
        summed: Tensor = kernels.cross_entropy(logits.contiguous(), labels, IGNORED)
        return summed

    def joined_product(self, x: Tensor, layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor]:
        """(…, H) → the outputs of all layers side by side, by one product, and their biases side by side. The product
        contains the biases without their gradients, which a kernel computes on its way."""
        bias = torch.cat([layer.bias for layer in layers])
        return F.linear(x, self.weight(*(layer.weight for layer in layers)), bias.detach()), bias
