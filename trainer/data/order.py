"""Which samples make up which step: a pure function of (seed, epoch, data set, sizes of the global batches).

An epoch goes through the shards in a shuffled order, `BLOCK_ROWS` rows or more at a time; the rows of such a block
are shuffled together. So a reader needs only a few shards at hand, a data set smaller than a block is shuffled as
a whole, and nothing but the block in use is ever in memory.

The shuffles sort a 64-bit hash of each index, keyed by (seed, epoch, block). The hash is spelt out here, so the order
is the same under every version of every library, on every machine.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.errors import UserError
from trainer.data.batch_ramp import BatchSizes, batch_of
from trainer.seeds import derive_seed

#: Rows shuffled together, at least: about 120 MB of phase-1 rows.
BLOCK_ROWS = 1 << 18
#: Part of every checkpoint: a change to the order, or to the seeds of any other random stream of training, raises it.
ORDER_VERSION = 2

#: Constants of splitmix64.
_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

Int64s = NDArray[np.int64]


def hash64(*words: int, index: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A hash of each element of `index` together with `words`, by splitmix64 (Steele et al., OOPSLA 2014)."""
    golden, mix1, mix2 = (np.uint64(c) for c in (_GOLDEN, _MIX1, _MIX2))
    out = index.astype(np.uint64)
    with np.errstate(over="ignore"):
        for word in (0, *words):
            out = out + np.uint64(word % 2**64) + golden
            out = (out ^ (out >> np.uint64(30))) * mix1
            out = (out ^ (out >> np.uint64(27))) * mix2
            out = out ^ (out >> np.uint64(31))
    return out


def shuffled(n: int, seed: int) -> Int64s:
    """The numbers 0 … n-1 in an order that depends on `seed` alone."""
    keys = hash64(seed, index=np.arange(n, dtype=np.uint64))
    return np.argsort(keys, kind="stable")


@dataclass(frozen=True)
class Samples:
    """Addresses of rows: row `row[i]` of shard `shard[i]`."""

    shard: Int64s
    row: Int64s

    def __getitem__(self, index: Int64s | slice) -> Samples:
        return Samples(self.shard[index], self.row[index])

    def __len__(self) -> int:
        return len(self.row)


@dataclass(frozen=True)
class _Epoch:
    """The blocks of one epoch: block b holds the shards `order[first[b] : first[b + 1]]`, `rows[b]` rows before it."""

    order: Int64s
    first: Int64s
    rows: Int64s


@dataclass(frozen=True)
class _Stretch:
    """The batches from `first` on, up to the next stretch: the place (epoch, position in it) of each batch of the ramp,
    and where the ramp ends."""

    first: int
    sizes: BatchSizes
    ramp: list[tuple[int, int]]
    after_ramp: tuple[int, int]


def require_whole_batches(rows_per_shard: Int64s, global_batch_size: int) -> None:
    """Raise `UserError` if the data set has fewer rows than one global batch."""
    total = int(rows_per_shard.sum())
    if total < global_batch_size:
        raise UserError(
            f"the data set has {total} samples, fewer than one global batch of {global_batch_size}; "
            f"use more text, a higher dupe_factor or a smaller global_batch_size"
        )


class SampleOrder:
    """Where the samples of each step are. An epoch ends when too few rows for the next batch are left: those rows,
    different ones each epoch, are its documented tail and sit that epoch out.
    """

    def __init__(
        self,
        rows_per_shard: Int64s,
        *,
        seed: int,
        sizes: Sequence[BatchSizes],
        skipped: Sequence[int] = (),
    ) -> None:
        """`sizes`: of all batches, skipped or not, in order; where some end, the next ones continue in the same epoch.
        `skipped`: batches, counted from 0, that no step uses.

        Raises `UserError` as `require_whole_batches`."""
        require_whole_batches(rows_per_shard, sizes[-1].whole)
        self.rows_per_shard = rows_per_shard
        self.seed = seed
        self.global_batch_size = sizes[-1].whole
        self._skipped = sorted(set(skipped))
        self._rows = int(rows_per_shard.sum())
        self._stretches = list[_Stretch]()
        for one in sizes:
            self._stretches.append(self._plan_stretch(one))
        self._epoch = functools.lru_cache(maxsize=2)(self._plan_epoch)
        self._block = functools.lru_cache(maxsize=2)(self._shuffle_block)

    def epoch_of(self, step: int) -> int:
        """The epoch, from 0, of step `step` (from 0) of the phase."""
        return self._place(self.batch_of(step))[0]

    def batch_size(self, step: int) -> int:
        """Samples of step `step` (from 0)."""
        return self._size(self.batch_of(step))

    def batch_of(self, step: int) -> int:
        """The number of the batch, from 0, that step `step` (from 0) uses."""
        return batch_of(step, self._skipped)

    def step(self, step: int) -> Samples:
        """The `batch_size` samples of step `step` (from 0), in order."""
        return self.steps(step, step + 1)

    def steps(self, first: int, last: int) -> Samples:
        """The samples of steps `first` … `last` - 1, in order."""
        pieces: list[Samples] = []
        at = first
        for end in range(first + 1, last + 1):
            # Up to the next batch that is skipped, all at once.
            if end == last or self.batch_of(end) - self.batch_of(at) > end - at:
                pieces += self._batches(self.batch_of(at), self.batch_of(end - 1) + 1)
                at = end
        return Samples(np.concatenate([p.shard for p in pieces]), np.concatenate([p.row for p in pieces]))

    def _batches(self, first: int, last: int) -> Iterator[Samples]:
        """The samples of batches `first` … `last` - 1; adjacent batches of an epoch are one piece."""
        epoch, start = self._place(first)
        end = start
        for batch in range(first, last):
            place = self._place(batch)
            if place != (epoch, end):
                yield from self._pieces(epoch, start, end)
                epoch, start = place
                end = start
            end += self._size(batch)
        yield from self._pieces(epoch, start, end)

    def _size(self, batch: int) -> int:
        return self._stretch(batch).sizes[batch]

    def _stretch(self, batch: int) -> _Stretch:
        return self._stretches[bisect.bisect_right(self._stretches, batch, key=lambda stretch: stretch.first) - 1]

    def _place(self, batch: int) -> tuple[int, int]:
        """The epoch of batch `batch`, and its first sample's position in the epoch."""
        stretch = self._stretch(batch)
        batch -= stretch.first
        if batch < len(stretch.ramp):
            return stretch.ramp[batch]
        (epoch, position), whole = stretch.after_ramp, stretch.sizes.whole
        batch -= len(stretch.ramp)
        left = (self._rows - position) // whole
        if batch < left:
            return epoch, position + batch * whole
        later, step_in_epoch = divmod(batch - left, self._rows // whole)
        return epoch + 1 + later, step_in_epoch * whole

    def _plan_stretch(self, sizes: BatchSizes) -> _Stretch:
        """The batches after those planned so far, which they continue."""
        # A resumed run may have fewer rows, too, than a batch had before.
        sizes = dataclasses.replace(sizes, whole=min(sizes.whole, self._rows))
        first, epoch, position = 0, 0, 0
        if self._stretches and (first := self._stretches[-1].sizes.end or 0):
            epoch, position = self._place(first - 1)
            position += self._size(first - 1)
        ramp = list[tuple[int, int]]()
        for batch in range(first, sizes.ramp.steps):
            if position + sizes[batch] > self._rows:
                epoch, position = epoch + 1, 0
            ramp.append((epoch, position))
            position += sizes[batch]
        return _Stretch(first, sizes, ramp, (epoch, position))

    def _pieces(self, epoch: int, position: int, end: int) -> Iterator[Samples]:
        """The samples from `position` to `end` in the order of an epoch, block by block."""
        plan = self._epoch(epoch)
        while position < end:
            block = int(np.searchsorted(plan.rows, position, side="right")) - 1
            start, stop = position - plan.rows[block], min(end, int(plan.rows[block + 1])) - plan.rows[block]
            yield self._block(epoch, block)[slice(start, stop)]
            position = int(plan.rows[block]) + int(stop)

    def _plan_epoch(self, epoch: int) -> _Epoch:
        order = shuffled(len(self.rows_per_shard), derive_seed(self.seed, "sample order", epoch, 0))
        ends = np.cumsum(self.rows_per_shard[order])
        first, rows = [0], [0]
        while first[-1] < len(order):
            shard = int(np.searchsorted(ends, rows[-1] + BLOCK_ROWS)) + 1
            first.append(min(shard, len(order)))
            rows.append(int(ends[first[-1] - 1]))
        return _Epoch(order, np.array(first), np.array(rows))

    def _shuffle_block(self, epoch: int, block: int) -> Samples:
        plan = self._epoch(epoch)
        shards = plan.order[plan.first[block] : plan.first[block + 1]]
        counts = self.rows_per_shard[shards]
        shard = np.repeat(shards, counts)
        row = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return Samples(shard, row)[shuffled(len(row), derive_seed(self.seed, "sample order", epoch, 1 + block))]
