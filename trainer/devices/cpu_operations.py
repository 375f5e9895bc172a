"""The model's operations on the CPU: those that torch's own kernels slow down by their passes over memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.data.bert_batch import IGNORED, filled_up
from trainer.models.operations import AttentionMask, Operations
from trainer.parallel.fp32_sums import at_least_fp32

#: Integers of the same size, for bitwise operations.
_BITS_OF = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}
#: Bytes of fp32 logits that `_CrossEntropy` handles at a time for each thread: they stay in the caches.
_CACHED = 2**20


class CpuOperations(Operations):
    """Dropout from 16 random bits per element, which costs a tenth of torch's. Cross-entropy a few rows at a time.
    Attention in bf16 by matrix products, which are faster than torch's own kernel."""

    def dropout(self, x: Tensor, p: float) -> Tensor:
        """p is rounded to a multiple of 2⁻¹⁶, and the scale follows."""
        drop = round(p * 2**16)
        dropped: Tensor = _Dropout.apply(x, drop) if drop else x  # type: ignore[no-untyped-call]
        return dropped

    def projections(self, x: Tensor, layers: Sequence[nn.Linear]) -> Sequence[Tensor]:
        return self.joined_projections(x, layers)

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        summed: Tensor = _CrossEntropy.apply(logits, labels)  # type: ignore[no-untyped-call]
        return summed

    def attention_mask(
        self, sequence_ids: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None = None
    ) -> AttentionMask:
        """For packed rows, (length, is a sequence and not padding) of each run; the usual mask in a compiled graph."""
        if cu_seqlens is None or torch.compiler.is_compiling():
            return super().attention_mask(sequence_ids, cu_seqlens)
        lengths = cu_seqlens.diff()
        is_run = lengths > 0
        is_sequence = sequence_ids.flatten()[cu_seqlens[:-1][is_run]] > 0
        return list(zip(lengths[is_run].tolist(), is_sequence.tolist(), strict=True))

    def attention(self, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, dropout_p: float) -> Tensor:
        if isinstance(mask, list):
            return self._attention_by_sequence(query, key, value, mask, dropout_p)
        if dropout_p == 0 and query.dtype != torch.bfloat16:
            # In bf16 its backward pass takes three times as long as that of products.
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.attention_by_products(query, key, value, mask, dropout_p)

    def _attention_by_sequence(
        self, query: Tensor, key: Tensor, value: Tensor, runs: list[tuple[int, bool]], dropout_p: float
    ) -> Tensor:
        """One sequence at a time, padded by `filled_up`: no scores between sequences are computed, and those of one
        sequence fit into the caches."""
        B, A, S, D = query.shape
        lengths = [length for length, _ in runs]

        def parts(x: Tensor) -> list[Tensor]:
            split = x.transpose(1, 2).reshape(B * S, A, D).split(lengths)
            # Contiguous: torch's bf16 matrix products take several times as long on strided operands.
            return [
                F.pad(part.transpose(0, 1), (0, 0, 0, filled_up(len(part)) - len(part))).contiguous() for part in split
            ]

        outs = []
        for q, k, v, (length, is_sequence) in zip(parts(query * D**-0.5), parts(key), parts(value), runs, strict=True):
            if is_sequence:
                scores = q @ k.transpose(1, 2)
                scores[:, :, length:] = torch.finfo(scores.dtype).min
                weights = torch.softmax(scores, dim=-1, dtype=scores.dtype)
                out = (self.dropout(weights, dropout_p) if dropout_p else weights) @ v
            else:
                out = torch.zeros_like(v)
            outs.append(out[:, :length].transpose(0, 1))
        return torch.cat(outs).view(B, S, A, D).transpose(1, 2)


class _Dropout(torch.autograd.Function):
    """Clears the bits of what is dropped and scales the rest: bitwise operations take a tenth of the time that products
    with booleans do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, drop: int) -> Tensor:
        """Drops where a random int16 is one of the `drop` smallest."""
        least_kept = drop - 2**15
        # All bits set where it is kept: clamp leaves two values, of which the lower becomes 0, the higher -1.
        bits = _random_int16(x.shape).clamp_(least_kept - 1, least_kept)
        keep = torch.rsub(bits, least_kept - 1).to(_BITS_OF[x.dtype])
        ctx.save_for_backward(keep)
        ctx.scale = 2**16 / (2**16 - drop)
        return _kept(x, keep, ctx.scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (keep,) = ctx.saved_tensors
        return _kept(gradient, keep, ctx.scale), None


def _random_int16(shape: torch.Size) -> Tensor:
    """From SFC64, seeded by torch's generator: the Mersenne Twister itself takes three times as long."""
    words = np.random.SFC64(int(torch.randint(2**63 - 1, ()))).random_raw((shape.numel() + 3) // 4)
    return torch.from_numpy(words.view(np.int16))[: shape.numel()].view(shape)


def _kept(x: Tensor, keep: Tensor, scale: float) -> Tensor:
    return (x.view(keep.dtype) & keep).view(x.dtype).mul_(scale)


class _CrossEntropy(torch.autograd.Function):
    """Computes a few rows at a time, with their gradients, while they are in the caches: (M, V) numbers in fp32 are
    never in memory. The gradients are kept in the logits' type, before they are multiplied by the sum's gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        gradient = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        rows = max(1, _CACHED * torch.get_num_threads() // (4 * logits.shape[1]))
        losses = [at_least_fp32(logits[:0, :1])]  # there may be no rows at all
        for start in range(0, len(logits), rows):
            own = slice(start, start + rows)
            wide, label = at_least_fp32(logits[own]), labels[own].clamp(min=0)[:, None]
            probabilities = torch.softmax(wide, dim=1)
            # The largest probability does not underflow, so its logarithm gives that of the sum of exponentials.
            log_sums = wide.amax(1, keepdim=True) - probabilities.amax(1, keepdim=True).log_()
            losses.append(log_sums - wide.gather(1, label))
            if gradient is not None:
                gradient[own] = probabilities.scatter_add_(1, label, wide.new_full(label.shape, -1))
        is_ignored = labels == IGNORED
        if gradient is not None:
            ctx.save_for_backward(gradient.index_fill_(0, is_ignored.nonzero().squeeze(1), 0))
        return torch.cat(losses).squeeze(1).masked_fill_(is_ignored, 0).sum()

    @staticmethod
    def backward(ctx: Any, of_sum: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * of_sum, None
