"""GELU of a product and its bias, in one pass over memory.

N: rows (tokens), H: columns.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainer.devices.kernels.operator import differentiate, operator
from trainer.devices.kernels.rows import block_of, programs_for

#: Rows and columns of a program's block.
_ROWS, _COLUMNS = 2, 1024


@triton.jit
def _below(x):
    """The share of the normal distribution below x, and exp(-x² / 2), which both GELU and its derivative have in them.
    Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26, whose error is at most 7.5e-8: a third of the
    instructions of erf, which take longer than memory."""
    t = 1 / (1 + 0.2316418954 * tl.abs(x))
    power = tl.exp(-0.5 * x * x)
    tail = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    tail = 0.5 * tail * power
    return tl.where(x < 0, tail, 1 - tail), power


@triton.jit(do_not_specialize=["rows"])
def _gelu_forward(product, bias_of, out, rows, H: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    bias = tl.load(bias_of + columns, mask=columns < H, other=0.0).to(tl.float32)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None] & (columns < H)[None, :]
    place = row.to(tl.int64)[:, None] * H + columns[None, :]
    x = tl.load(product + place, mask=inside, other=0.0).to(tl.float32) + bias[None, :]
    below, _ = _below(x)
    tl.store(out + place, x * below, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _gelu_backward(
    gradient, product, bias_of, d_product, parts, rows, H: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """`parts` (programs, H): each program's share of the bias's gradient."""
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    bias = tl.load(bias_of + columns, mask=columns < H, other=0.0).to(tl.float32)
    d_bias = tl.zeros([ROWS, BLOCK], tl.float32)
    first = tl.program_id(0) * ROWS
    while first < rows:
        row = first + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (columns < H)[None, :]
        place = row.to(tl.int64)[:, None] * H + columns[None, :]
        x = tl.load(product + place, mask=inside, other=0.0).to(tl.float32) + bias[None, :]
        given = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
        below, power = _below(x)
        dx = given * (below + x * 0.3989422804014327 * power)
        tl.store(d_product + place, dx, mask=inside)
        d_bias += dx
        first += tl.num_programs(0) * ROWS
    tl.store(parts + tl.program_id(0) * H + columns, tl.sum(d_bias, 0), mask=columns < H)


def _gelu_like(product: Tensor, bias: Tensor) -> Tensor:
    return torch.empty_like(product)


@operator("bias_gelu", _gelu_like)
def _gelu(product: Tensor, bias: Tensor) -> Tensor:
    rows, columns = product.shape
    out = torch.empty_like(product)
    block = block_of(min(columns, _COLUMNS))
    grid = triton.cdiv(rows, _ROWS), triton.cdiv(columns, block["BLOCK"])
    _gelu_forward[grid](product, bias, out, rows, H=columns, ROWS=_ROWS, **block)
    return out


def _gelu_gradients_like(gradient: Tensor, product: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(product), bias.new_empty(len(bias), dtype=torch.float32)


@operator("bias_gelu_backward", _gelu_gradients_like)
def _gelu_gradients(gradient: Tensor, product: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of product, and of bias in fp32."""
    rows, columns = product.shape
    d_product = torch.empty_like(product)
    block = block_of(min(columns, _COLUMNS))
    blocks = triton.cdiv(columns, block["BLOCK"])
    programs = programs_for(product, blocks)
    parts = torch.empty(programs, columns, dtype=torch.float32, device=product.device)
    _gelu_backward[(programs, blocks)](
        gradient, product, bias, d_product, parts, rows, H=columns, ROWS=_ROWS, **block
    )  # fmt: skip
    return d_product, parts.sum(0)


def _gelu_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gelu_differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    product, bias = ctx.saved_tensors
    d_product, d_bias = _gelu_gradients(gradient.contiguous(), product, bias)
    return d_product, d_bias.to(bias.dtype)


differentiate(_gelu, _gelu_differentiate, _gelu_context)


def bias_gelu(product: Tensor, bias: Tensor) -> Tensor:
    """gelu(product + bias), (…, H) → (…, H) of the product's type."""
    out: Tensor = _gelu(product.contiguous().view(-1, product.shape[-1]), bias)
    return out.view(product.shape)
