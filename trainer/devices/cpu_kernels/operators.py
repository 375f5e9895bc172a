"""The kernels as operations that autograd differentiates. N: rows (tokens), H: columns.

Gradients of biases and weights are sums over rows in fp32 (float64: in float64): blocks of rows first, then their sums.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainer.devices.cpu_kernels.build import Library, library
from trainer.parallel.fp32_sums import wide

#: Rows that share a stream of random bits (UNIT in kernels.c), and the most blocks of rows that are summed apart.
_UNIT, _BLOCKS = 16, 64


def functions() -> Library:
    found = library()
    assert found is not None
    return found


def dropped(p: float) -> tuple[int, int]:
    """(seed, how many of 65,536 numbers mean that one is dropped). The seed is drawn from torch's generator."""
    drop = round(p * 2**16)
    return (int(torch.randint(2**63 - 1, ())) if drop else 0), drop


def _blocks(rows: int) -> tuple[int, int]:
    """Rows of a block, a multiple of `_UNIT`, and the number of blocks."""
    block = _UNIT * max(1, -(-rows // (_UNIT * _BLOCKS)))
    return block, -(-rows // block)


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, product: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(product, bias)
        out = torch.empty_like(product)
        functions().call("gelu_forward", product.dtype, product, bias.to(wide(product.dtype)), out, *product.shape)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        product, bias = ctx.saved_tensors
        own, (block, blocks) = bias.to(wide(product.dtype)), _blocks(len(product))
        d_product, parts = torch.empty_like(product), own.new_empty(blocks, len(bias))
        given = gradient.contiguous(), product, own, d_product, parts
        functions().call("gelu_backward", product.dtype, *given, *product.shape, block)
        return d_product, parts.sum(0).to(bias.dtype)


def bias_gelu(product: Tensor, bias: Tensor) -> Tensor:
    """gelu(product + bias), (…, H) → (…, H) of the product's type."""
    out: Tensor = _Gelu.apply(product.contiguous().view(-1, product.shape[-1]), bias)  # type: ignore[no-untyped-call]
    return out.view(product.shape)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, product: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, shift: Tensor, p: float, eps: float
    ) -> tuple[Tensor, Tensor]:
        own = [one.to(wide(product.dtype)) for one in (bias, weight, shift)]
        means, scales = (torch.empty(len(product), dtype=wide(product.dtype)) for _ in range(2))
        ctx.dropped, out = dropped(p), torch.empty_like(product)
        functions().call(
            "norm_forward", product.dtype, product, own[0], residual, own[1], own[2], out, means, scales,
            *product.shape, eps, *ctx.dropped,
        )  # fmt: skip
        ctx.save_for_backward(product, bias, residual, weight, means, scales)
        ctx.shift_type = shift.dtype
        ctx.set_materialize_grads(False)
        return out, out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [gradient.contiguous() for gradient in gradients if gradient is not None]
        if not given:
            return (None,) * 7
        product, bias, residual, weight, means, scales = ctx.saved_tensors
        block, blocks = _blocks(len(product))
        d_product, d_residual = torch.empty_like(product), torch.empty_like(residual)
        parts = means.new_empty(blocks, 3, product.shape[1])
        functions().call(
            "norm_backward", product.dtype, *given, *[None] * (2 - len(given)), product, bias.to(means.dtype), residual,
            weight.to(means.dtype), means, scales, d_product, d_residual, parts, *product.shape, block, *ctx.dropped,
        )  # fmt: skip
        types = bias.dtype, weight.dtype, ctx.shift_type
        d_bias, d_weight, d_shift = (total.to(dtype) for total, dtype in zip(parts.sum(0), types, strict=True))
        return d_product, d_bias, d_residual, d_weight, d_shift, None, None


def bias_dropout_add_norm(
    product: Tensor, bias: Tensor, residual: Tensor, norm: torch.nn.LayerNorm, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """norm(dropout(product + bias) + residual), (…, H) → (…, H) of the product's type, twice: what is computed from the
    one and from the other has gradients that are added up here, without a pass over memory of their own. `dropout_p` is
    rounded to a multiple of 2⁻¹⁶, and the scale follows."""
    flat, others = (x.to(product.dtype).contiguous().view(-1, x.shape[-1]) for x in (product, residual))
    given = flat, bias, others, norm.weight, norm.bias, dropout_p, norm.eps
    one, two = _Norm.apply(*given)  # type: ignore[no-untyped-call]
    return one.view(product.shape), two.view(product.shape)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        ctx.dropped = dropped(p)
        return scaled_or_zero(x, ctx.dropped)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return scaled_or_zero(gradient, ctx.dropped), None


def scaled_or_zero(x: Tensor, decision: tuple[int, int]) -> Tensor:
    """`x` as `dropped` decides it."""
    x = x.contiguous()
    out = torch.empty_like(x)
    functions().call("dropout", x.dtype, x, out, x.numel(), *decision)
    return out


def dropout(x: Tensor, p: float) -> Tensor:
    """Zero a share `p` of `x`, rounded to a multiple of 2⁻¹⁶, and scale the rest accordingly."""
    out: Tensor = _Dropout.apply(x, p)  # type: ignore[no-untyped-call]
    return out


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, ignored: int) -> Tensor:
        labels, ctx.ignored = labels.contiguous(), ignored
        losses, stats = (torch.empty(len(logits), n, dtype=wide(logits.dtype)) for n in (1, 2))
        given = logits, labels, losses, stats
        if wrong := functions().call("cross_entropy_forward", logits.dtype, *given, *logits.shape, ignored):
            raise IndexError(f"{wrong} labels are not in [0, {logits.shape[1]})")
        ctx.save_for_backward(logits, labels, stats)
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_sum: Tensor) -> tuple[Tensor, None, None]:
        logits, labels, stats = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        given = logits, labels, stats, gradient
        functions().call("cross_entropy_backward", logits.dtype, *given, *logits.shape, ctx.ignored, of_sum.item())
        return gradient, None, None


def cross_entropy(logits: Tensor, labels: Tensor, ignored: int) -> Tensor:
    """The sum of cross-entropies, in nats, of logits (M, V), without the rows whose label is `ignored`; in fp32 at
    least. Raises IndexError for other labels that are no columns."""
    out: Tensor = _CrossEntropy.apply(logits, labels, ignored)  # type: ignore[no-untyped-call]
    return out
