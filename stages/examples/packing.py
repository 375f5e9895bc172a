"""Several sequences in one row: which go together, and how their arrays become those of the row.

Sequences are packed by their lengths alone, from a histogram of these: the longest first, each into the fullest row
that still has room. This is the longest-pack-first histogram packing of Krell et al. 2021, arXiv:2107.02027, section
3.1, with a limit on the masked positions of a row beside that on its tokens. Its time depends on the number of
different lengths, not on that of the sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stages.examples.form import RowCapacity
from trainer.data.hdf5 import Array


@dataclass(frozen=True)
class Pack:
    """So many rows, each with sequences of these lengths, longest first."""

    rows: int
    lengths: tuple[int, ...] = ()
    masked: int = 0

    def grown(self, rows: int, length: int, times: int, masked: int) -> Pack:
        """`rows` of these, each with `times` sequences more."""
        return Pack(rows, (*self.lengths, *(length,) * times), self.masked + times * masked)


def plan_packs(histogram: Array, masked: Array, limits: RowCapacity) -> list[Pack]:
    """Rows for `histogram[n]` sequences of n tokens with `masked[n]` > 0 masked positions; both
    (limits.tokens + 1,)."""
    #: Free tokens → rows with so many.
    open_rows: list[list[Pack]] = [[] for _ in range(limits.tokens)]
    for length in range(limits.tokens, 0, -1):
        left, needed = int(histogram[length]), int(masked[length])
        for free in range(length, limits.tokens + 1):
            if not left:
                break
            there = open_rows[free] if free < limits.tokens else [Pack(left)]
            kept = []
            for pack in there:
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
    """Which sequences share a row: (rows, limits.sequences) int32 numbers of them, -1 for none.

    `lengths` (sequences,) in tokens, 1 … limits.tokens; `masked` (limits.tokens + 1,): masked positions by length.
    Sequences of one length are taken in their order.
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
    """Which of the first `tokens` places of each row are taken: lengths (N,) → (N, tokens) bool."""
    taken: Array = np.arange(tokens, dtype=np.int32) < lengths[:, None]
    return taken


def pack_tokens(sequences: Array, lengths: Array, tokens: int) -> Array:
    """Sequences (M, …) of `tokens` each, padded, in the rows (N, tokens) that hold those of `lengths` (N, slots)."""
    rows = np.zeros((len(lengths), tokens), sequences.dtype)
    rows[real_places(lengths.sum(1), tokens)] = sequences[real_places(lengths[lengths > 0], tokens)]
    return rows


def unpack_tokens(rows: Array, lengths: Array) -> Array:
    """The inverse of `pack_tokens`: (M, tokens), zero-padded."""
    tokens = rows.shape[1]
    sequences = np.zeros((int(np.count_nonzero(lengths)), tokens), rows.dtype)
    sequences[real_places(lengths[lengths > 0], tokens)] = rows[real_places(lengths.sum(1), tokens)]
    return sequences


def pack_masked(positions: Array, ids: Array, lengths: Array) -> tuple[Array, Array]:
    """Masked positions and former ids (M, P) of sequences as those of the rows (N, P), positions counted in the row.

    `lengths` (N, slots). Position 0, a row's first [CLS], stands for none, before and after.
    """
    is_sequence = lengths > 0
    starts = (np.cumsum(lengths, axis=1) - lengths)[is_sequence]
    chosen = positions > 0
    row = np.nonzero(is_sequence)[0]
    masked = np.bincount(row, chosen.sum(1), minlength=len(lengths)).astype(np.int64)
    there = real_places(masked, positions.shape[1])
    packed = np.zeros(there.shape, positions.dtype), np.zeros(there.shape, ids.dtype)
    packed[0][there], packed[1][there] = (positions + starts[:, None])[chosen], ids[chosen]
    return packed
