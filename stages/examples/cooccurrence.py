"""Word vectors from the counts of tokens that occur near each other: a truncated SVD of their positive pointwise mutual
information (Levy, Goldberg and Dagan 2015, "Improving distributional similarity with lessons learned from word
embeddings", TACL 3, sections 2 and 3).

V: entries of the vocabulary, H: length of a vector, R: rows, S: tokens in a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

#: Tokens on each side that count as near; a pair at distance d counts 1/d (Pennington et al. 2014, GloVe, section 4.2).
WINDOW = 2
#: The exponent that smooths the contexts' probabilities, and that of the singular values (Levy et al., section 3).
CONTEXT_SMOOTHING, SINGULAR_VALUE_POWER = 0.75, 0.5
#: Extra directions, and power iterations, of the randomised SVD (Halko et al. 2011, arXiv:0909.4061, section 4).
_OVERSAMPLING, _ITERATIONS = 32, 2
#: Squares of singular values below this share of the largest are rounding errors of fp32.
_RELATIVE_RANK = 1e-12
#: Counts are kept as whole multiples of 1 / `_UNIT`, so that their sums are exact.
_UNIT = math.lcm(*range(1, WINDOW + 1))

Ints = NDArray[np.int64]


class Cooccurrences:
    """How often each pair of tokens occurs within `WINDOW`, nearer ones counting more."""

    def __init__(self, vocab_size: int) -> None:
        """`vocab_size`: larger than every id; at most 2³¹."""
        self.vocab_size = vocab_size
        self._pairs: list[Ints] = []
        self._counts: list[Ints] = []

    def add(self, ids: Ints, is_text: NDArray[np.bool_]) -> None:
        """Count the rows (R, S). Pairs with anything that is not text between them are left out."""
        segment = np.cumsum(~is_text, axis=1)
        for distance in range(1, WINDOW + 1):
            left, right = np.s_[:, :-distance], np.s_[:, distance:]
            near = is_text[left] & is_text[right] & (segment[left] == segment[right])
            pairs, counts = np.unique(ids[left][near] * self.vocab_size + ids[right][near], return_counts=True)
            self._pairs.append(pairs)
            self._counts.append(counts * (_UNIT // distance))

    def matrix(self, size: int) -> Tensor:
        """The counts, sparse (V, V) and symmetric; `size`: V, larger than every id that was counted."""
        V = self.vocab_size
        pairs, counts = np.concatenate(self._pairs), np.concatenate(self._counts)
        order = np.argsort(pairs)
        pairs, counts = pairs[order], counts[order]
        starts = np.flatnonzero(np.diff(pairs, prepend=-1))
        pairs, sums = pairs[starts], np.add.reduceat(counts, starts) if len(starts) else counts
        first, second = torch.from_numpy(pairs // V), torch.from_numpy(pairs % V)
        places = torch.stack([torch.cat([first, second]), torch.cat([second, first])])
        values = torch.from_numpy(sums / _UNIT).repeat(2)
        return torch.sparse_coo_tensor(places, values, (size, size), check_invariants=False).coalesce()


def positive_pmi(counts: Tensor) -> Tensor:
    """max(0, log P(w, c) / (P(w) P(c)^0.75 / Σ P^0.75)) of sparse counts (V, V); only positive entries are kept."""
    places, values = counts.indices(), counts.values()
    totals = torch.zeros(counts.shape[0], dtype=values.dtype).index_add_(0, places[0], values)
    contexts = totals**CONTEXT_SMOOTHING
    contexts /= contexts.sum()
    information = torch.log(values / (totals[places[0]] * contexts[places[1]]))
    kept = information > 0
    return torch.sparse_coo_tensor(places[:, kept], information[kept].float(), counts.shape, is_coalesced=True)


def word_vectors(information: Tensor, size: int, seed: int) -> Tensor:
    """Vectors (V, H) of length 1, or 0 where the row of `information` (V, V) is 0. H is `size`, or the rank if less.

    The left singular vectors times a power of the singular values, by subspace iteration from a random start (`seed`).
    """
    random = np.random.default_rng(seed).standard_normal((len(information), size + _OVERSAMPLING), np.float32)
    times, transposed_times = _product(information), _product(information.t().coalesce())
    Q = _orthonormal(times(torch.from_numpy(random)))
    for _ in range(_ITERATIONS):
        Q = _orthonormal(times(transposed_times(Q)))
    projected = transposed_times(Q)
    squares, rotation = torch.linalg.eigh(_gram(projected))
    largest = torch.arange(len(squares) - 1, -1, -1)[:size]
    scale = squares[largest].clamp(min=0) ** (SINGULAR_VALUE_POWER / 2)
    vectors = Q @ (rotation[:, largest] * scale).float()
    is_seen = torch.zeros(len(information), 1, dtype=torch.bool)
    is_seen[information.indices()[0]] = True
    found: Tensor = torch.where(is_seen, torch.nn.functional.normalize(vectors, dim=1), 0.0)
    return found


def _product(matrix: Tensor) -> Callable[[Tensor], Tensor]:
    """x ↦ `matrix` · x for a sparse matrix, as sums of bags of rows: three times as fast as torch's sparse product,
    which some builds of torch lack."""
    rows, columns = matrix.indices()
    starts = torch.searchsorted(rows, torch.arange(len(matrix) + 1))
    weights = matrix.values()
    return lambda x: torch.nn.functional.embedding_bag(
        columns, x, starts, mode="sum", per_sample_weights=weights, include_last_offset=True
    )


def _gram(x: Tensor) -> Tensor:
    return x.double().T @ x.double()


def _orthonormal(x: Tensor) -> Tensor:
    """An orthonormal basis of the columns' span; five times as fast as a QR decomposition of a tall matrix."""
    squares, rotation = torch.linalg.eigh(_gram(x))
    kept = squares > squares[-1] * _RELATIVE_RANK
    basis: Tensor = (x.double() @ (rotation[:, kept] / squares[kept].sqrt())).float()
    return basis
