"""Attention on CPUs: torch's batched products, and one pass over memory for what lies between them.

T: tokens, A: heads, D: head size, H = A · D. A group's rows R have the same length L in the micro-batch, and S places
for products, of which those beyond L are zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainer.devices.cpu_kernels import operators
from trainer.parallel.fp32_sums import wide


@dataclass(frozen=True)
class Group:
    """Rows that are multiplied at once: a micro-batch that is not packed, or a single sequence of a packed one."""

    #: The first one's place among the tokens; rows R; L; S.
    start: int
    rows: int
    length: int
    places: int
    #: (R,) int32: how many of a row's tokens are attended to, 1 or more.
    attended: Tensor


@dataclass(frozen=True)
class Sequences:
    """A micro-batch's `AttentionMask`. What is in no group is padding, whose results are 0."""

    groups: Sequence[Group]
    tokens: int
    #: (B, 1, 1, S) bool, as in `Operations.attention_mask`; None for packed rows.
    of_rows: Tensor | None = None

    @property
    def has_padding(self) -> bool:
        return sum(group.rows * group.length for group in self.groups) < self.tokens


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, bias: Tensor, sequences: Sequences, heads: int, p: float) -> Tensor:
        width = qkv.shape[1] // 3
        out = (qkv.new_zeros if sequences.has_padding else qkv.new_empty)(len(qkv), width)
        ctx.sequences, ctx.bias_type, ctx.heads = sequences, bias.dtype, heads
        ctx.dropped = [operators.dropped(p) for _ in sequences.groups]
        saved = []
        for group, drawn in zip(sequences.groups, ctx.dropped, strict=True):
            q, k, v = _split(qkv, 3, group, heads)
            scores = torch.bmm(q, k.transpose(1, 2))
            kept = torch.empty_like(scores) if drawn[1] else scores
            operators.functions().call(
                "softmax_forward", qkv.dtype, scores, group.attended, scores, kept, *_rows(scores, group),
                q.shape[2] ** -0.5, *drawn,
            )  # fmt: skip
            _join(torch.bmm(kept, v)[None], out, group, None)
            saved += [q, k, v, scores, kept]
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradient, heads, saved = gradient.contiguous(), ctx.heads, iter(ctx.saved_tensors)
        tokens, width = gradient.shape
        make = gradient.new_zeros if ctx.sequences.has_padding else gradient.new_empty
        d_qkv, sums = (
            make(tokens, 3 * width),
            gradient.new_zeros(3, heads, width // heads, dtype=wide(gradient.dtype)),
        )
        for group, drawn in zip(ctx.sequences.groups, ctx.dropped, strict=True):
            q, k, v, weights, kept = (next(saved) for _ in range(5))
            (d_out,) = _split(gradient, 1, group, heads)
            scores = torch.bmm(d_out, v.transpose(1, 2))
            operators.functions().call(
                "softmax_backward", q.dtype, scores, weights, group.attended, *_rows(scores, group),
                q.shape[2] ** -0.5, *drawn,
            )  # fmt: skip
            split = q.new_empty(3, *q.shape)
            torch.bmm(scores, k, out=split[0])
            torch.bmm(scores.transpose(1, 2), q, out=split[1])
            torch.bmm(kept.transpose(1, 2), d_out, out=split[2])
            parts = sums.new_empty(group.rows, heads, 3, width // heads)
            _join(split, d_qkv, group, parts)
            sums += parts.sum(0).transpose(0, 1)
        return d_qkv, sums.flatten().to(ctx.bias_type), None, None, None


def _rows(scores: Tensor, group: Group) -> tuple[int, int, int]:
    """Rows of the scores, their columns, and how many of the former share a length."""
    matrices, rows, columns = scores.shape
    return matrices * rows, columns, matrices * rows // group.rows


def _split(joined: Tensor, parts: int, group: Group, heads: int) -> Tensor:
    """A group's part of (T, parts · H) → (parts, R · A, S, D)."""
    stride = joined.shape[1]
    head_size = stride // parts // heads
    split = joined.new_empty(parts, group.rows * heads, group.places, head_size)
    shape = parts, group.rows, group.length, heads, group.places, head_size
    operators.functions().call("split_heads", joined.dtype, joined[group.start :], split, stride, *shape)
    return split


def _join(split: Tensor, joined: Tensor, group: Group, sums: Tensor | None) -> None:
    """The reverse, into `joined`; `sums` (R, A, parts, D): sums over a row's tokens."""
    parts, matrices, _, head_size = split.shape
    shape = parts, group.rows, group.length, matrices // group.rows, group.places, head_size
    operators.functions().call("join_heads", split.dtype, split, joined[group.start :], sums, joined.shape[1], *shape)


def attention(qkv: Tensor, bias: Tensor, sequences: Sequences, heads: int, dropout_p: float) -> Tensor:
    """Scaled dot-product attention, (T, 3H) → (T, H): a token attends to its own sequence.

    `qkv`: queries, keys and values, in which `bias` (3H,) is contained without its gradient; it gets it here, where no
    pass over memory is needed for it. `dropout_p`: share of the attention weights to drop, rounded to a multiple of
    2⁻¹⁶; the scale of the others follows.
    """
    out: Tensor = _Attention.apply(qkv, bias, sequences, heads, dropout_p)  # type: ignore[no-untyped-call]
    return out
