"""Attention of sequences that lie one after another, without padding, as Triton kernels: FlashAttention-2 (Dao 2023,
arXiv:2307.08691), which never has the scores in memory.

Beside torch's own kernel of that name: query, key and value are parts of one product's result, and their gradients
become one tensor, which the same pass sums for the bias; gradients are summed in a fixed order; what dropout keeps is
drawn once, 32 weights a word, and read again in the backward pass.

T: tokens of all sequences, A: heads, D: head size, H = A · D, R: sequences, some of which may be empty.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from trainer.devices.kernels.attention_kernels import backward_keys, backward_queries, draw_kept, forward
from trainer.devices.kernels.operator import differentiate, operator

_LOG2_E = 1.4426950408889634
#: Types and the largest heads that the kernels take.
TYPES, HEAD_SIZE_MAX = (torch.bfloat16, torch.float16), 128


class _Shape(NamedTuple):
    """Queries and keys in a block, warps of a program, blocks that are in shared memory at a time."""

    queries: int
    keys: int
    warps: int
    stages: int


#: Of heads of at most 64, and of larger ones, which leave shared memory less room. Small blocks need few registers, so
#: that more programs run at a time.
_FORWARD = _Shape(64, 32, 4, 3), _Shape(64, 64, 4, 2)
_QUERIES = _Shape(64, 32, 4, 3), _Shape(64, 64, 4, 2)
_KEYS = _Shape(32, 64, 4, 3), _Shape(64, 64, 4, 1)


def takes_heads(dtype: torch.dtype, head_size: int) -> bool:
    """Whether `attention` takes heads of this size and type."""
    return dtype in TYPES and head_size <= HEAD_SIZE_MAX


def _draws(dropout_p: float) -> int:
    """How many of 256 numbers mean that a weight is dropped."""
    return min(255, round(dropout_p * 256))


class _Problem:
    """What all kernels of one call are told."""

    def __init__(self, qkv: Tensor, bounds: Tensor, max_seqlen: int, heads: int, dropout_p: float) -> None:
        tokens, width = len(qkv), qkv.shape[1] // 3
        self.max_seqlen, self.sequences, self.heads = max_seqlen, len(bounds) - 1, heads
        self.head_size, self.drop = width // heads, _draws(dropout_p)
        self.words = triton.cdiv(max_seqlen, 32)
        assert max(heads, 3) * self.words * tokens < 2**31, "the kernels' indices have 32 bits"
        assert self.sequences < 2**16, "a GPU's grid has as many programs in its second dimension"
        # Exponentials are powers of 2. Weights that are kept are scaled by 1 / (share of the kept).
        self.kept_scale = 256 / (256 - self.drop)
        self.numbers = (tokens, self.words, _LOG2_E * self.head_size**-0.5, self.kept_scale)

    def launch(self, kernel: Any, shapes: tuple[_Shape, _Shape], blocks: int, *given: Any) -> None:
        """A program for each of so many blocks of each sequence and head."""
        shape = self.of(shapes)
        kernel[(blocks, self.sequences, self.heads)](
            *given, H=self.heads * self.head_size, D=self.head_size, DROPS=self.drop > 0,
            DP=max(16, triton.next_power_of_2(self.head_size)), QUERIES=shape.queries, KEYS=shape.keys,
            num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip

    def of(self, shapes: tuple[_Shape, _Shape]) -> _Shape:
        return shapes[self.head_size > 64]

    def blocks(self, size: int) -> int:
        """How many blocks of so many queries or keys the longest sequence has."""
        return -(-self.max_seqlen // size)


def _attention_like(
    qkv: Tensor, bias: Tensor, bounds: Tensor, lengths: Tensor, max_seqlen: int, heads: int, dropout_p: float
) -> tuple[Tensor, Tensor, Tensor]:
    out = qkv.new_empty(len(qkv), qkv.shape[1] // 3)
    shape = (heads, -(-max_seqlen // 32), len(qkv)) if _draws(dropout_p) else (0,)
    return out, qkv.new_empty(heads, len(qkv), dtype=torch.float32), qkv.new_empty(shape, dtype=torch.int32)


@operator("attention", _attention_like, tags=(torch.Tag.nondeterministic_seeded,))
def _attention(
    qkv: Tensor, bias: Tensor, bounds: Tensor, lengths: Tensor, max_seqlen: int, heads: int, dropout_p: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The result; base-2 logarithms of the sums of exponentials, (A, T); which weights are kept."""
    problem = _Problem(qkv, bounds, max_seqlen, heads, dropout_p)
    out, log_sums, kept = _attention_like(qkv, bias, bounds, lengths, max_seqlen, heads, dropout_p)
    if problem.drop:
        seed = torch.randint(2**62, (1,), device=qkv.device)
        grid = triton.cdiv(len(qkv), 256), problem.words, heads
        draw_kept[grid](seed, lengths, kept, len(qkv), drop=problem.drop, BLOCK=256)
    blocks = problem.blocks(problem.of(_FORWARD).queries)
    problem.launch(forward, _FORWARD, blocks, qkv, bounds, kept, out, log_sums, *problem.numbers)
    return out, log_sums, kept


def _gradients_like(
    gradient: Tensor, qkv: Tensor, bounds: Tensor, out: Tensor, log_sums: Tensor, kept: Tensor, max_seqlen: int,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(qkv), log_sums.new_empty(qkv.shape[1])


@operator("attention_backward", _gradients_like)
def _gradients(
    gradient: Tensor, qkv: Tensor, bounds: Tensor, out: Tensor, log_sums: Tensor, kept: Tensor, max_seqlen: int,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of qkv, and of the bias in fp32."""
    problem = _Problem(qkv, bounds, max_seqlen, len(log_sums), dropout_p)
    d_qkv, along = torch.empty_like(qkv), torch.empty_like(log_sums)
    numbers = *problem.numbers, problem.head_size**-0.5 * problem.kept_scale
    width = len(log_sums) * problem.head_size
    of_queries, of_keys = problem.blocks(problem.of(_QUERIES).queries), problem.blocks(problem.of(_KEYS).keys)
    d_q = log_sums.new_empty(of_queries * problem.sequences, width)
    d_kv = log_sums.new_empty(of_keys * problem.sequences, 2 * width)
    given = bounds, kept, log_sums, along, d_qkv
    problem.launch(backward_queries, _QUERIES, of_queries, gradient, qkv, out, *given, d_q, *numbers)
    problem.launch(backward_keys, _KEYS, of_keys, gradient, qkv, *given, d_kv, *numbers)
    return d_qkv, torch.cat([d_q.sum(0), d_kv.sum(0)])


def _context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    qkv, bias, bounds, _, ctx.max_seqlen, _, ctx.dropout_p = inputs
    ctx.save_for_backward(qkv, bounds, *output)
    ctx.bias_type = bias.dtype
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, gradient: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if gradient is None:
        return (None,) * 7
    d_qkv, d_bias = _gradients(gradient.contiguous(), *ctx.saved_tensors, ctx.max_seqlen, ctx.dropout_p)
    return d_qkv, d_bias.to(ctx.bias_type), None, None, None, None, None


differentiate(_attention, _differentiate, _context)


def attention(
    qkv: Tensor, bias: Tensor, bounds: Tensor, lengths: Tensor, max_seqlen: int, heads: int, dropout_p: float
) -> Tensor:
    """Scaled dot-product attention, (T, 3H) → (T, H): a token attends to its own sequence.

    `qkv`: queries, keys and values, in which `bias` (3H,) is contained without its gradient; it gets it here, where no
    pass over memory is needed for it. `bounds` (R + 1,) int32: where the sequences begin, and T; `lengths` (T,) int32:
    that of each token's sequence; `max_seqlen`: at least the longest one's. `dropout_p`: share of the attention weights
    to drop, rounded to a multiple of 1/256 (0, if it is below 1/512); the scale of the others follows.
    """
    out: Tensor = _attention(qkv, bias, bounds, lengths, max_seqlen, heads, dropout_p)[0]
    return out
