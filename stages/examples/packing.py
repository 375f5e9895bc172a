"""Packing several sequences into one row: which ones share a row, and the conversion of their arrays.

Packing works on the histogram of sequence lengths: longest first, each into the fullest row that still has room. This
is the longest-pack-first histogram packing of Krell et al. 2021, arXiv:2107.02027, section 3.1, with a limit on a
row's masked positions in addition to its tokens. Its time depends on the number of distinct lengths, not of sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stages.examples.form import RowCapacity
from trainer.data.hdf5 import Array


@dataclass(frozen=True)
class Pack:
    """A number of rows with the same content: sequences of `lengths`, longest first."""

    rows: int
    lengths: tuple[int, ...] = ()
    masked: int = 0

    def grown(self, rows: int, length: int, times: int, masked: int) -> Pack:
        """`rows` rows like this one, each with `times` more sequences of `length` tokens."""
        return Pack(rows, (*self.lengths, *(length,) * times), self.masked + times * masked)


def plan_packs(histogram: Array, masked: Array, limits: RowCapacity) -> list[Pack]:
    """Plan rows for `histogram[n]` sequences of n tokens with `masked[n]` > 0 masked positions each.

    Both arrays: (limits.tokens + 1,).
    """
    #: Indexed by the number of free tokens.
    open_rows: list[list[Pack]] = [[] for _ in range(limits.tokens)]
    for length in range(limits.tokens, 0, -1):
        left, needed = int(histogram[length]), int(masked[length])
        for free in range(length, limits.tokens + 1):
            if not left:
                break
            candidates = open_rows[free] if free < limits.tokens else [Pack(left)]
            kept = []
            for pack in candidates:
                fit = min(free // length, limits.sequences - len(pack.lengths), (limits.masked - pack.masked) // needed)
                if not left or fit < 1:
                    kept.append(pack)
                    continue
                rest = pack.rows
                for rows, times in ((min(rest, left // fit), fit), (1, left % fit)):
                    if rest and rows and times and left:
                        open_rows[free - times * length].append(pack.grown(rows, length, times, needed))
                        left, rest = left - rows * times, rest - rows
                if rest and free < limits.tokens:
                    kept.append(Pack(rest, pack.lengths, pack.masked))
            if free < limits.tokens:
                open_rows[free] = kept
        assert not left, (
            f"{left} sequences of {length} tokens have {needed} masked positions; a row has {limits.masked}"
        )
    return [pack for packs in open_rows for pack in packs]


def pack(lengths: Array, masked: Array, limits: RowCapacity) -> Array:
    """Assign sequences to rows: (rows, limits.sequences) int32 sequence indices, -1 for an empty slot.

    `lengths` (sequences,) in tokens, 1 … limits.tokens; `masked` (limits.tokens + 1,): masked positions by length.
    Sequences of equal length keep their order.
    """
    by_length = np.argsort(lengths, kind="stable")
    histogram = np.bincount(lengths, minlength=limits.tokens + 1)
    taken = np.cumsum(histogram) - histogram
    packs = plan_packs(histogram, masked, limits)
    rows = np.full((sum(pack.rows for pack in packs), limits.sequences), -1, np.int32)
    first = 0
    for pack in packs:
        for slot, length in enumerate(pack.lengths):
            rows[first : first + pack.rows, slot] = by_length[taken[length] : taken[length] + pack.rows]
            taken[length] += pack.rows
        first += pack.rows
    return rows


def real_places(lengths: Array, tokens: int) -> Array:
    """Mask of the occupied positions of each row: lengths (N,) → (N, tokens) bool."""
    taken: Array = np.arange(tokens, dtype=np.int32) < lengths[:, None]
    return taken


def pack_tokens(sequences: Array, lengths: Array, tokens: int) -> Array:
    """Pack padded sequences (M, tokens) into rows (N, tokens), given the sequence lengths of each row, (N, slots)."""
    rows = np.zeros((len(lengths), tokens), sequences.dtype)
    rows[real_places(lengths.sum(1), tokens)] = sequences[real_places(lengths[lengths > 0], tokens)]
    return rows


def unpack_tokens(rows: Array, lengths: Array) -> Array:
    """Inverse of `pack_tokens`; returns (M, tokens), zero-padded."""
    tokens = rows.shape[1]
    sequences = np.zeros((int(np.count_nonzero(lengths)), tokens), rows.dtype)
    sequences[real_places(lengths[lengths > 0], tokens)] = rows[real_places(lengths.sum(1), tokens)]
    return sequences


def pack_masked(positions: Array, ids: Array, lengths: Array) -> tuple[Array, Array]:
    """Convert masked positions and original ids of sequences (M, P) to those of rows (N, P), positions within the row.

    `lengths` (N, slots). In input and output, position 0, the first [CLS], means none.
    """
    is_sequence = lengths > 0
    starts = (np.cumsum(lengths, axis=1) - lengths)[is_sequence]
    chosen = positions > 0
    row = np.nonzero(is_sequence)[0]
    masked = np.bincount(row, chosen.sum(1), minlength=len(lengths)).astype(np.int64)
    used = real_places(masked, positions.shape[1])
    packed = np.zeros(used.shape, positions.dtype), np.zeros(used.shape, ids.dtype)
    packed[0][used], packed[1][used] = (positions + starts[:, None])[chosen], ids[chosen]
    return packed
