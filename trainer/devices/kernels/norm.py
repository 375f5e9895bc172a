"""The end of each half of a BERT layer in one pass over memory: bias, dropout, residual and LayerNorm.

N: rows (tokens), H: columns.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainer.devices.kernels.operator import differentiate, operator
from trainer.devices.kernels.rows import ROUNDS, block_of, programs_for


@triton.jit
def _kept(seed, row, drop: tl.constexpr, BLOCK: tl.constexpr):
    """Which of a row's `BLOCK` numbers dropout keeps: 16 random bits of Philox (Salmon et al. 2011) each, 8 numbers a
    call, drop those among the `drop` smallest."""
    GROUPS: tl.constexpr = BLOCK // 8
    a, b, c, d = tl.randint4x(seed, row * GROUPS + tl.arange(0, GROUPS), n_rounds=ROUNDS)
    words = tl.join(tl.join(a, b), tl.join(c, d)).to(tl.uint32, bitcast=True)
    return tl.reshape(tl.join(words & 0xFFFF, words >> 16), [BLOCK]) >= drop


@triton.jit
def _sum(product, bias, residual, seed, row, columns, inside, drop: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr):
    """A row of dropout(product + bias) + residual, in fp32, and which numbers were kept."""
    place = row.to(tl.int64) * H + columns
    x = tl.load(product + place, mask=inside, other=0.0).to(tl.float32) + bias
    r = tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    keep = inside
    if drop > 0:
        keep = _kept(seed, row, drop, BLOCK)
        x = tl.where(keep, x * (65536 / (65536 - drop)), 0.0)
    return x + r, keep


@triton.jit(do_not_specialize=["rows"])
def _norm_forward(
    product, bias_of, residual, weight_of, shift_of, seed_of, out, mean_of, scale_of, rows, eps,
    drop: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK)
    inside = columns < H
    bias = tl.load(bias_of + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_of + columns, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(shift_of + columns, mask=inside, other=0.0).to(tl.float32)
    seed = tl.load(seed_of)
    row = tl.program_id(0)
    while row < rows:
        x, _ = _sum(product, bias, residual, seed, row, columns, inside, drop, H, BLOCK)
        mean = tl.sum(tl.where(inside, x, 0.0)) / H
        centred = tl.where(inside, x - mean, 0.0)
        scale = tl.rsqrt(tl.sum(centred * centred) / H + eps)
        tl.store(mean_of + row, mean)
        tl.store(scale_of + row, scale)
        tl.store(out + row.to(tl.int64) * H + columns, centred * scale * weight + shift, mask=inside)
        row += tl.num_programs(0)


@triton.jit(do_not_specialize=["rows"])
def _norm_backward(
    gradient, other, product, bias_of, residual, weight_of, seed_of, mean_of, scale_of, d_product, d_residual, parts,
    rows, TWO: tl.constexpr, drop: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`other`: with `TWO`, to be added to `gradient`. `parts` (3, programs, H): each program's share of the gradients
    of bias, weight and shift."""
    columns = tl.arange(0, BLOCK)
    inside = columns < H
    bias = tl.load(bias_of + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_of + columns, mask=inside, other=0.0).to(tl.float32)
    seed = tl.load(seed_of)
    d_bias = tl.zeros([BLOCK], tl.float32)
    d_weight = tl.zeros([BLOCK], tl.float32)
    d_shift = tl.zeros([BLOCK], tl.float32)
    row = tl.program_id(0)
    while row < rows:
        place = row.to(tl.int64) * H + columns
        x, keep = _sum(product, bias, residual, seed, row, columns, inside, drop, H, BLOCK)
        given = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
        if TWO:
            given += tl.load(other + place, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scale_of + row)
        normal = tl.where(inside, (x - tl.load(mean_of + row)) * scale, 0.0)
        d_normal = given * weight
        mean, along = tl.sum(d_normal) / H, tl.sum(d_normal * normal) / H
        dx = (d_normal - mean - normal * along) * scale
        tl.store(d_residual + place, dx, mask=inside)
        if drop > 0:
            dx = tl.where(keep, dx * (65536 / (65536 - drop)), 0.0)
        tl.store(d_product + place, dx, mask=inside)
        d_bias += dx
        d_weight += given * normal
        d_shift += given
        row += tl.num_programs(0)
    part = tl.program_id(0) * H + columns
    programs = tl.num_programs(0)
    tl.store(parts + part, d_bias, mask=inside)
    tl.store(parts + programs * H + part, d_weight, mask=inside)
    tl.store(parts + 2 * programs * H + part, d_shift, mask=inside)


def _drop(dropout_p: float) -> int:
    """How many of 65,536 numbers mean that one is dropped."""
    return min(65535, round(dropout_p * 65536))


def _norm_like(
    product: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, shift: Tensor, dropout_p: float, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = product.new_empty(len(product), dtype=torch.float32)
    return torch.empty_like(product), rows, torch.empty_like(rows), rows.new_empty(1, dtype=torch.int64)


@operator("bias_dropout_add_norm", _norm_like, tags=(torch.Tag.nondeterministic_seeded,))
def _norm(
    product: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, shift: Tensor, dropout_p: float, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The result; each row's mean and 1 / standard deviation, fp32; the seed of what was dropped."""
    rows, columns = product.shape
    out = torch.empty_like(product)
    mean, scale = (torch.empty(rows, dtype=torch.float32, device=product.device) for _ in range(2))
    seed = torch.randint(2**62, (1,), device=product.device) if _drop(dropout_p) else mean.new_zeros(1).long()
    _norm_forward[(programs_for(product),)](
        product, bias, residual, weight, shift, seed, out, mean, scale, rows, eps,
        drop=_drop(dropout_p), H=columns, **block_of(columns),
    )  # fmt: skip
    return out, mean, scale, seed


def _norm_gradients_like(
    gradient: Tensor, other: Tensor | None, product: Tensor, bias: Tensor, residual: Tensor, weight: Tensor,
    mean: Tensor, scale: Tensor, seed: Tensor, dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(product), torch.empty_like(residual), mean.new_empty(3, product.shape[1])


@operator("bias_dropout_add_norm_backward", _norm_gradients_like)
def _norm_gradients(
    gradient: Tensor, other: Tensor | None, product: Tensor, bias: Tensor, residual: Tensor, weight: Tensor,
    mean: Tensor, scale: Tensor, seed: Tensor, dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of product and residual; those of bias, weight and shift, (3, H), fp32. `other`: a gradient to be
    added to the first."""
    rows, columns = product.shape
    d_product, d_residual = torch.empty_like(product), torch.empty_like(residual)
    programs = programs_for(product)
    parts = mean.new_empty(3, programs, columns)
    given = gradient, gradient if other is None else other
    _norm_backward[(programs,)](
        *given, product, bias, residual, weight, seed, mean, scale, d_product, d_residual, parts, rows,
        TWO=other is not None, drop=_drop(dropout_p), H=columns, **block_of(columns),
    )  # fmt: skip
    return d_product, d_residual, parts.sum(1)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """What `_differentiate` needs."""
    *tensors, _, ctx.dropout_p, _ = inputs
    ctx.shift_type = inputs[4].dtype
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.set_materialize_grads(False)


def _norm_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _keep(ctx, inputs, output)
    ctx.mark_non_differentiable(*output[1:])


def _norm_differentiate(ctx: Any, gradient: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    return _differentiate(ctx, gradient)


def _differentiate(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    """Of one result or the same one twice."""
    given = [gradient.contiguous() for gradient in gradients if gradient is not None]
    if not given:
        return (None,) * 7
    product, bias, residual, weight, *saved = ctx.saved_tensors
    d_product, d_residual, sums = _norm_gradients(
        given[0], given[1] if len(given) > 1 else None, product, bias, residual, weight, *saved, ctx.dropout_p
    )
    types = bias.dtype, weight.dtype, ctx.shift_type
    d_bias, d_weight, d_shift = (total.to(dtype) for total, dtype in zip(sums, types, strict=True))
    return d_product, d_bias, d_residual, d_weight, d_shift, None, None


differentiate(_norm, _norm_differentiate, _norm_context)


class _NormTwice(torch.autograd.Function):
    """Not an operator of torch's, which may not return a tensor twice."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        output = _norm(*given)
        _keep(ctx, given, output)
        return output[0], output[0].view_as(output[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, other: Tensor | None) -> tuple[Tensor | None, ...]:
        return _differentiate(ctx, gradient, other)


def bias_dropout_add_norm(
    product: Tensor, bias: Tensor, residual: Tensor, norm: torch.nn.LayerNorm, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """norm(dropout(product + bias) + residual), (…, H) → (…, H) of the product's type, twice: what is computed from the
    one and from the other has gradients that are added up here, without a pass over memory of their own. `dropout_p` is
    rounded to a multiple of 2⁻¹⁶, and the scale follows."""
    flat, others = (x.contiguous().view(-1, x.shape[-1]) for x in (product, residual))
    given = flat, bias, others, norm.weight, norm.bias, dropout_p, norm.eps
    if torch.compiler.is_compiling():
        out: Tensor = _norm(*given)[0].view(product.shape)
        return out, out
    one, two = _NormTwice.apply(*given)  # type: ignore[no-untyped-call]
    return one.view(product.shape), two.view(product.shape)
