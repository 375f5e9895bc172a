"""Weights whose gradients are added to their sums in one pass over memory.

By itself autograd converts a bf16 gradient to fp32 in memory and then adds it, and makes a gradient of the whole
vocabulary from one of a few words: with BERT-Base an eighth of the time of a micro-step of 1,024 tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from trainer.devices.cpu_kernels.operators import functions
from trainer.parallel.fp32_sums import gradient_sum


class _Narrow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.total = gradient_sum(weight)
        return weight.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        functions().call("add", gradient.dtype, gradient.contiguous(), ctx.total, gradient.numel())
        return None, None


class NarrowWeights:
    """Weights as autocast multiplies them."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, ...], Tensor] | None = None

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """The context in which no weight changes: each is converted once."""
        self._kept = {}
        try:
            yield
        finally:
            self._kept = None

    def of(self, *weights: Tensor) -> Tensor | None:
        """fp32 weights, one below the other, in the type that autocast has for products; None if it has none, or if
        their gradients are not summed by `gradient_sum`."""
        is_summed = torch.is_grad_enabled() and all(gradient_sum(weight) is not None for weight in weights)
        is_converted = torch.is_autocast_enabled("cpu") and all(weight.dtype == torch.float32 for weight in weights)
        dtype = torch.get_autocast_dtype("cpu")
        if not is_summed or not is_converted or dtype != torch.bfloat16:
            return None
        key = tuple(map(id, weights))
        if self._kept is not None and key in self._kept:
            return self._kept[key]
        narrow: list[Tensor] = [_Narrow.apply(weight, dtype) for weight in weights]  # type: ignore[no-untyped-call]
        joined = torch.cat(narrow) if len(narrow) > 1 else narrow[0]
        if self._kept is not None:
            self._kept[key] = joined
        return joined


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
