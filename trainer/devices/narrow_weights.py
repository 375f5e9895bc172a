"""Weights in the type of products, whose gradients are added to their sums in one pass over memory.

By itself autograd converts a bf16 gradient to fp32 in memory and then adds it, and joins weights in each micro-step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainer.parallel.fp32_sums import gradient_sum


class _Narrow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, dtype: torch.dtype, add: Callable[[Tensor, Tensor], object]) -> Tensor:
        ctx.total, ctx.add = gradient_sum(weight), add
        return weight.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.add(ctx.total, gradient)
        return None, None, None


class NarrowWeights:
    """Weights as autocast multiplies them."""

    def __init__(self, add: Callable[[Tensor, Tensor], object]) -> None:
        """`add`: adds to a sum in fp32 a gradient of another type."""
        self._add = add
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
        kind = "cpu" if weights[0].is_cpu else "cuda"
        is_summed = torch.is_grad_enabled() and all(gradient_sum(weight) is not None for weight in weights)
        is_converted = torch.is_autocast_enabled(kind) and all(weight.dtype == torch.float32 for weight in weights)
        dtype = torch.get_autocast_dtype(kind)
        if not is_summed or not is_converted or dtype != torch.bfloat16:
            return None
        key = tuple(map(id, weights))
        if self._kept is not None and key in self._kept:
            return self._kept[key]
        narrow: list[Tensor] = [_Narrow.apply(weight, dtype, self._add) for weight in weights]  # type: ignore[no-untyped-call]
        joined = torch.cat(narrow) if len(narrow) > 1 else narrow[0]
        if self._kept is not None:
            self._kept[key] = joined
        return joined
