"""Gradients of weights that are added to their sums in one pass over memory.

By itself autograd converts a bf16 gradient to fp32 in memory and then adds it, and makes a gradient of the whole
vocabulary from one of a few words: with BERT-Base an eighth of the time of a micro-step of 1,024 tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from trainer.devices.cpu_kernels.operators import functions
from trainer.parallel.fp32_sums import gradient_sum


def add_gradient(total: Tensor, gradient: Tensor) -> None:
    """Add to a sum in fp32, or float64."""
    functions().call("add", gradient.dtype, gradient.contiguous(), total, gradient.numel())


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.total, ctx.padding = gradient_sum(weight), padding
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        (ids,) = ctx.saved_tensors
        given = gradient.contiguous(), ids.contiguous(), ctx.total
        functions().call("embedding_backward", gradient.dtype, *given, ids.numel(), gradient.shape[-1], ctx.padding)
        return None, None, None


def embedding(ids: Tensor, weight: Tensor, padding: int | None) -> Tensor:
    """The rows of `weight`, which has a `gradient_sum`, with these ids; that of `padding` has no gradient."""
    rows: Tensor = _Embedding.apply(ids, weight, -1 if padding is None else padding)  # type: ignore[no-untyped-call]
    return rows
