"""Evenly spaced rows of a data set's shards, as text: what statistics of large data sets are estimated from.

R: rows read at once, S: tokens in a row.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from trainer.data.order import Samples
from trainer.data.reader import BatchReader, unmasked
from trainer.data.shards import ShardSet

#: Limits on what is read: files (those of other tools are decoded whole), and rows in all of them together.
_SHARDS_MAX, _ROWS_MAX = 16, 1 << 16
_ROWS_AT_ONCE = 4096


def evenly_spaced(count: int, most: int) -> list[int]:
    """At most `most` of the numbers 0 … count - 1, as evenly spaced as whole numbers can be."""
    chosen = min(count, most)
    return [index * count // chosen for index in range(chosen)]


def sampled_shards(names: list[str]) -> list[str]:
    """Those files that `text_rows` reads, given the `names` of all of a data set's files in order."""
    return [names[index] for index in evenly_spaced(len(names), _SHARDS_MAX)]


def sampled_rows(shards: ShardSet) -> Samples:
    """Evenly spaced rows, the same for the same data."""
    chosen = evenly_spaced(len(shards.names), _SHARDS_MAX)
    rows = [np.array(evenly_spaced(int(shards.rows_per_shard[one]), _ROWS_MAX // len(chosen))) for one in chosen]
    return Samples(np.repeat(chosen, [len(one) for one in rows]), np.concatenate(rows).astype(np.int64))


def text_rows(shards: ShardSet, vocab_size: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
    """Yield ids (R, S) of `sampled_rows`, and which of them are text (R, S): neither [CLS], [SEP] nor padding.

    Masked tokens have their original ids. [CLS] and [SEP] are recognized as the first and last token of a row, which
    are never masked. Raises `UserError` on an id outside the vocabulary.
    """
    reader, samples = BatchReader(shards, vocab_size=vocab_size), sampled_rows(shards)
    for start in range(0, len(samples), _ROWS_AT_ONCE):
        arrays = reader.read(samples[np.s_[start : start + _ROWS_AT_ONCE]])
        ids, is_text = unmasked(arrays), arrays["input_mask"].astype(bool)
        cls, sep = ids[0, 0], ids[0, np.count_nonzero(is_text[0]) - 1]
        yield ids, is_text & (ids != cls) & (ids != sep)
