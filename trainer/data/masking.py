"""Masked tokens of BERT's examples: which are chosen, and what they are replaced by.

In each sequence, a share of the tokens is chosen uniformly; 80 % of those become [MASK], 10 % a random ordinary token,
and 10 % stay (Devlin et al. 2018, section 3.1). The functions take random numbers, so that examples can be masked once,
by a generator (`stages.examples`), or whenever they are read (`DynamicMasking`).

M: sequences, S: tokens in a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.data.hdf5 import Array
from trainer.data.mask_rate import MaskRate
from trainer.data.order import hash64
from trainer.data.vocabulary import Vocabulary
from trainer.seeds import derive_seed

#: The largest key, of what is no candidate. A candidate at the last of 2^n places is left out with it, once in 2^(32-n)
#: draws.
_NEVER = (1 << 32) - 1


def masked_positions(lengths: Array, share: float, most: int) -> Array:
    """Number of masked positions in sequences of `lengths` tokens: that share of them, 1 to `most`; int64, same shape.

    As in google-research/bert's create_pretraining_data.py.
    """
    return (lengths * share).round().astype("int64").clip(1, most)


def choose_tokens(bits: Array, candidates: Array, wanted: Array, limit: int, *, low: int) -> Array:
    """Draw `wanted` candidates of each sequence uniformly: (M, limit) positions, ascending, 0 for none.

    `bits`: random numbers, (M, S) uint32, of which all but the `low` last bits are used, which S - 1 fits into.
    """
    S = candidates.shape[1]
    # Random high bits, position in the low bits: a row's smallest keys are a draw without replacement.
    keys = bits >> np.uint32(low) << np.uint32(low)
    keys |= np.arange(S, dtype=np.uint32)
    keys[~candidates] = _NEVER
    picks = min(limit, S)
    keys = np.sort(np.partition(keys, picks - 1, axis=1)[:, :picks], axis=1)
    chosen = (np.arange(picks) < wanted[:, None]) & (keys != _NEVER)
    return _ascending(np.where(chosen, keys & np.uint32((1 << low) - 1), S), S, limit)


def choose_words(draws: Array, rows: Array, candidates: Array, wanted: Array, limit: int, continues: Array) -> Array:
    """Like `choose_tokens`, but takes whole words in random order, each if it still fits into `wanted`.

    `draws`: random numbers in [0, 1), (M, S); `rows`: the ids.
    """
    N, S = rows.shape
    column = np.arange(S)
    begins = candidates & ~(continues[rows] & np.roll(candidates, 1, axis=1))
    word = np.cumsum(begins, axis=1) - 1
    word[~candidates] = S  # a word that is never drawn
    sizes = np.zeros((N, S + 1), np.int64)
    np.add.at(sizes, (np.broadcast_to(np.arange(N)[:, None], (N, S)), word), 1)
    words = begins.sum(axis=1)
    order = np.argsort(np.where(column < words[:, None], draws, 2.0), axis=1, kind="stable")
    taken = np.zeros((N, S + 1), bool)
    left, every = wanted.copy(), np.arange(N)
    for step in range(int(words.max(initial=0))):
        drawn = order[:, step]
        fits = (step < words) & (sizes[every, drawn] <= left)
        taken[every, drawn] |= fits
        left -= np.where(fits, sizes[every, drawn], 0)
        if not left.any():
            break
    chosen = taken[every[:, None], word] & candidates
    return _ascending(np.partition(np.where(chosen, column, S), min(limit, S - 1), axis=1)[:, :limit], S, limit)


def _ascending(positions: Array, none: int, limit: int) -> Array:
    """Sort positions, replace `none` (larger than any position) by 0, and pad to `limit` columns."""
    result = np.zeros((len(positions), limit), np.int64)
    positions = np.sort(positions, axis=1)
    result[:, : positions.shape[1]] = np.where(positions == none, 0, positions)
    return result


def replaced(before: Array, fate: Array, replacement: Array, mask: int) -> Array:
    """What replaces the chosen ids `before`; `fate`: random numbers in [0, 1), `replacement`: random ids."""
    return np.where(fate < 0.8, mask, np.where(fate < 0.9, before, replacement))


@dataclass(frozen=True)
class Masking:
    """How examples are masked when they are read."""

    rate: MaskRate = MaskRate()
    whole_words: bool = False


class DynamicMasking:
    """Masks that are a pure function of (seed, epoch, sample, share): each epoch has different ones."""

    def __init__(self, masking: Masking, vocabulary: Vocabulary, *, seed: int, falling: range) -> None:
        """`falling`: optimizer steps, from 0, in which the rate goes from its first to its last value."""
        self.masking = masking
        self.vocabulary = vocabulary
        self._seed, self._falling = seed, falling

    def mask(
        self, ids: Array, lengths: Array, numbers: NDArray[np.int64], *, step: int, epoch: int
    ) -> tuple[Array, Array]:
        """Mask rows `ids` (B, S) in place; returns the masked places in the flattened rows, ascending, and what was
        there.

        `lengths` (B, K): tokens of each of a row's sequences, which follow each other; 0: none. `numbers` (B,): the
        rows' numbers in the data set.
        """
        S = ids.shape[1]
        row, _ = np.nonzero(lengths)
        starts = (np.cumsum(lengths, axis=1) - lengths)[lengths > 0]
        length = lengths[lengths > 0]
        column = np.arange(int(length.max(initial=1)))
        real = column < length[:, None]
        places = np.where(real, (row * S + starts)[:, None] + column, 0)
        tokens = ids.reshape(-1)[places]
        candidates = real & (tokens != self.vocabulary.cls) & (tokens != self.vocabulary.sep)
        random = hash64(
            derive_seed(self._seed, "masked positions", epoch),
            index=((numbers[row] * S + starts)[:, None] + column).astype(np.uint64),
        )
        limit = len(column)
        wanted = masked_positions(length, self.masking.rate.at(step, self._falling), limit)
        if self.masking.whole_words:
            positions = choose_words(_unit(random), tokens, candidates, wanted, limit, self.vocabulary.continues)
        else:
            bits = (random >> np.uint64(32)).astype(np.uint32)
            positions = choose_tokens(bits, candidates, wanted, limit, low=(S - 1).bit_length())  # whatever the batch
        sequence, slot = np.nonzero(positions)  # position 0 is [CLS], which is never masked: it means none
        chosen = positions[sequence, slot]
        masked = places[sequence, chosen]
        before = tokens[sequence, chosen]
        random = hash64(
            derive_seed(self._seed, "masked ids", epoch),
            index=(numbers[row[sequence]] * S + starts[sequence] + chosen).astype(np.uint64),
        )
        ordinary = self.vocabulary.ordinary
        replacement = ordinary[(random & np.uint64(_NEVER)) % np.uint64(len(ordinary))]
        ids.reshape(-1)[masked] = replaced(before, _unit(random), replacement, self.vocabulary.mask)
        return masked, before


def _unit(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Random 64-bit numbers as numbers in [0, 1), by their 32 high bits."""
    return (bits >> np.uint64(32)).astype(np.float64) * 2.0**-32
