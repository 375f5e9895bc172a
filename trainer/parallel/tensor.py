"""How ranks that share one model communicate, and the layers built on it.

The split is that of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, section 3): a dense layer split by columns,
followed by one split by rows, needs one sum forward and one backward. Every rank computes the same losses.

B: sequences, S: tokens, H: hidden size, M: masked positions, V: this rank's rows of the vocabulary, K: those in a loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.parallel.fp32_sums import Embedding
from trainer.parallel.plan import padded_length, share
from trainer.seeds import derive_seed

#: Sums (True) or maxima (False) of tensors over the ranks, in place.
AllReduce = Callable[[list[Tensor], bool], None]


class TensorParallel:
    """Rank `rank` of `size` that share a model. By default a single one, for which nothing is done."""

    def __init__(
        self, rank: int = 0, size: int = 1, all_reduce: AllReduce | None = None,
        random_region: Callable[[int], contextlib.AbstractContextManager[None]] | None = None,
    ) -> None:  # fmt: skip
        """`random_region(seed)`: a context with its own random numbers; after it, those outside continue as if nothing
        had happened. A single rank needs neither argument."""
        self.rank = rank
        self.size = size
        self._all_reduce = all_reduce
        self._random_region = random_region
        self._seed = self._regions = 0

    def copy(self, x: Tensor) -> Tensor:
        """`x`, on its way into what is split: its gradient is the sum of all ranks' gradients."""
        if self.size == 1:
            return x
        copied: Tensor = _Copy.apply(x, self)  # type: ignore[no-untyped-call]
        return copied

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' `x`, on its way out of what is split."""
        if self.size == 1:
            return x
        total: Tensor = _Sum.apply(x, self)  # type: ignore[no-untyped-call]
        return total

    def largest(self, x: Tensor) -> Tensor:
        """The largest of all ranks' `x`, element by element; without a gradient."""
        x = x.detach().clone()
        self.reduce_in_place(x, sums=False)
        return x

    def reduce_in_place(self, x: Tensor, *, sums: bool = True) -> None:
        if self.size > 1:
            assert self._all_reduce is not None
            self._all_reduce([x], sums)

    def share(self, length: int) -> int:
        """A rank's part of an axis of that length, padding included."""
        return padded_length(length, self.size) // self.size

    # Randomness: the same on all ranks, except in what is split.

    def seed(self, seed: int) -> None:
        """Begin a micro-step or an update, whose randomness outside of what is split has this seed."""
        self._seed, self._regions = seed, 0

    def region(self) -> contextlib.AbstractContextManager[None]:
        """Random numbers drawn inside are this rank's own."""
        if self.size == 1:
            return contextlib.nullcontext()
        assert self._random_region is not None
        self._regions += 1
        return self._random_region(derive_seed(self._seed, "tensor-parallel region", self._regions, self.rank))


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorParallel) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        ctx.ranks.reduce_in_place(gradient)
        return gradient, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorParallel) -> Tensor:
        x = x.clone(memory_format=torch.contiguous_format)
        ranks.reduce_in_place(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class RowLinear(nn.Linear):
    """A dense layer whose input is split: (…, in / t) → (…, out), the same on all ranks. The bias is whole."""

    def __init__(self, inputs: int, outputs: int, ranks: TensorParallel) -> None:
        super().__init__(ranks.share(inputs), outputs)
        self._ranks = ranks

    def forward(self, x: Tensor) -> Tensor:
        if self._ranks.size == 1:
            return super().forward(x)
        return self.product(x) + self.bias

    def product(self, x: Tensor, *, weight: Tensor | None = None) -> Tensor:
        """The same without the bias; `weight`: the layer's, as `Operations.weight` gives it."""
        return self._ranks.sum(F.linear(x, self.weight if weight is None else weight))


class VocabularyEmbedding(Embedding):
    """Word embeddings whose rows are split: (B, S) ids → (B, S, H), the same on all ranks."""

    def __init__(self, vocab_size: int, hidden_size: int, ranks: TensorParallel) -> None:
        super().__init__(ranks.share(vocab_size), hidden_size, padding_idx=0 if ranks.rank == 0 else None)
        self._ranks = ranks

    @property
    def is_split(self) -> bool:
        return self._ranks.size > 1

    def forward(self, ids: Tensor) -> Tensor:
        if not self.is_split:
            return super().forward(ids)
        mine, here = own_ids(ids, self.num_embeddings, self._ranks)
        return self._ranks.sum(super().forward(mine) * here[..., None])


def own_ids(ids: Tensor, rows: int, ranks: TensorParallel) -> tuple[Tensor, Tensor]:
    """`ids` as numbers of this rank's rows, 0 for other ranks'; and which of them are this rank's, bool."""
    mine = ids - ranks.rank * rows
    here = (mine >= 0) & (mine < rows)
    return torch.where(here, mine, torch.zeros_like(mine)), here


def own_labels(labels: Tensor, rows: int, ranks: TensorParallel) -> Tensor:
    """`labels` as numbers of this rank's rows, negative where they are another rank's; as they are on a single rank."""
    if ranks.size == 1:
        return labels
    mine, here = own_ids(labels, rows, ranks)
    return torch.where(here, mine, torch.full_like(mine, -1))


def own_words(vocab_size: int, ranks: TensorParallel) -> int:
    """How many of this rank's rows of the vocabulary are not padding: the first ones."""
    return len(range(vocab_size)[share(vocab_size, ranks.rank, ranks.size)])


def vocabulary_cross_entropy(logits: Tensor, labels: Tensor, counts: Tensor, own: int, ranks: TensorParallel) -> Tensor:
    """The sum of cross-entropies, in nats, of logits (M, K) that are split over the ranks, which are never gathered.

    `labels` (M,): columns of this rank, negative where the label is another rank's; `counts` (M,), bool: whether there
    is a label. Columns from `own` on are padding.
    """
    is_padding = torch.arange(logits.shape[1], device=logits.device) >= own
    logits = logits.masked_fill(is_padding, torch.finfo(logits.dtype).min)
    shifted = logits - ranks.largest(logits.amax(1))[:, None]
    of_label = shifted.gather(1, labels.clamp(min=0)[:, None])[:, 0] * (labels >= 0)
    total, of_label = ranks.sum(shifted.exp().sum(1)), ranks.sum(of_label)
    return ((total.log() - of_label) * counts).sum()
