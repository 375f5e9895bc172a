"""Cross-entropy without the logits, or their exponentials, in fp32.

M: rows (masked positions), V: words.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainer.devices.kernels.operator import differentiate, operator

#: Logits of a row that are handled at a time.
_LOGITS = 4096


@triton.jit(do_not_specialize=["V"])
def _cross_entropy_forward(logits, labels, losses, log_sums, V, ignored: tl.constexpr, BLOCK: tl.constexpr):
    """A row's loss, and the logarithm of the sum of its exponentials."""
    row = tl.program_id(0)
    first = logits + row.to(tl.int64) * V
    most = tl.full([BLOCK], -3e38, tl.float32)  # not -inf, which less itself is no number
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(first + columns, mask=columns < V, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(most, x)
        total = total * tl.exp(most - larger) + tl.exp(x - larger)
        most = larger
    top = tl.max(most)
    log_sum = top + tl.log(tl.sum(total * tl.exp(most - top)))
    label = tl.load(labels + row)
    counts = label != ignored
    of_label = tl.load(first + tl.where(counts, label, 0)).to(tl.float32)
    tl.store(log_sums + row, log_sum)
    tl.store(losses + row, tl.where(counts, log_sum - of_label, 0.0))


@triton.jit(do_not_specialize=["V"])
def _cross_entropy_backward(gradient, logits, labels, log_sums, out, V, ignored: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = row.to(tl.int64) * V + columns
    label = tl.load(labels + row)
    x = tl.load(logits + place, mask=columns < V, other=0.0).to(tl.float32)
    probability = tl.exp(x - tl.load(log_sums + row))
    given = tl.where(label != ignored, tl.load(gradient).to(tl.float32), 0.0)
    tl.store(out + place, given * tl.where(columns == label, probability - 1, probability), mask=columns < V)


def _cross_entropy_like(logits: Tensor, labels: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    return logits.new_empty((), dtype=torch.float32), logits.new_empty(len(logits), dtype=torch.float32)


@operator("cross_entropy", _cross_entropy_like)
def _cross_entropy(logits: Tensor, labels: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """The sum of the rows' losses, and the logarithms of their sums of exponentials, fp32."""
    rows, words = logits.shape
    losses, log_sums = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    _cross_entropy_forward[(rows,)](
        logits, labels, losses, log_sums, words, ignored=ignored, BLOCK=_LOGITS, num_warps=8
    )  # fmt: skip
    return losses.sum(), log_sums


def _cross_entropy_gradient_like(
    gradient: Tensor, logits: Tensor, labels: Tensor, log_sums: Tensor, ignored: int
) -> Tensor:
    return torch.empty_like(logits)


@operator("cross_entropy_backward", _cross_entropy_gradient_like)
def _cross_entropy_gradient(gradient: Tensor, logits: Tensor, labels: Tensor, log_sums: Tensor, ignored: int) -> Tensor:
    rows, words = logits.shape
    out = torch.empty_like(logits)
    _cross_entropy_backward[(rows, triton.cdiv(words, _LOGITS))](
        gradient, logits, labels, log_sums, out, words, ignored=ignored, BLOCK=_LOGITS, num_warps=8
    )  # fmt: skip
    return out


def _cross_entropy_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, labels, ctx.ignored = inputs
    ctx.save_for_backward(logits, labels, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _cross_entropy_differentiate(ctx: Any, gradient: Tensor | None, _: None) -> tuple[Tensor | None, None, None]:
    if gradient is None:
        return None, None, None
    logits, labels, log_sums = ctx.saved_tensors
    return _cross_entropy_gradient(gradient, logits, labels, log_sums, ctx.ignored), None, None


differentiate(_cross_entropy, _cross_entropy_differentiate, _cross_entropy_context)


def cross_entropy(logits: Tensor, labels: Tensor, ignored: int) -> Tensor:
    """The sum of cross-entropies, in nats, of logits (M, V), without the rows whose label is `ignored`; fp32."""
    out: Tensor = _cross_entropy(logits, labels, ignored)[0]
    return out
