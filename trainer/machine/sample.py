"""A data set of random ids: well-formed rows that mean nothing, for tests of everything but learning."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainer.data.shards import id_dtype, write_shard

#: Ids of the special tokens; ordinary ones start at 5.
_CLS, _SEP, _MASK, _FIRST = 2, 3, 4, 5
#: Tokens in the shortest row that can be made.
SHORTEST = 8


def sample_rows(
    rows: int, *, vocab_size: int, seq_len: int, max_pred_len: int, seed: int
) -> dict[str, NDArray[np.generic]]:
    """The arrays of a shard: [CLS] a [SEP] b [SEP] padding, of varied length, masks anywhere but on special tokens."""
    rng = np.random.default_rng(seed)
    ids = np.zeros((rows, seq_len), id_dtype(vocab_size))
    mask, segments = np.zeros((rows, seq_len), np.uint8), np.zeros((rows, seq_len), np.uint8)
    positions, labels = np.zeros((rows, max_pred_len), np.uint16), np.zeros((rows, max_pred_len), ids.dtype)
    for row in range(rows):
        length = int(rng.integers(SHORTEST, seq_len + 1))
        middle = int(rng.integers(2, length - 3))
        ids[row, :length] = rng.integers(_FIRST, vocab_size, length)
        ids[row, [0, middle, length - 1]] = _CLS, _SEP, _SEP
        mask[row, :length] = 1
        segments[row, middle + 1 : length] = 1
        free = np.setdiff1d(np.arange(1, length - 1), [middle])
        chosen = np.sort(rng.choice(free, size=min(len(free), int(rng.integers(1, max_pred_len + 1))), replace=False))
        positions[row, : len(chosen)] = chosen
        labels[row, : len(chosen)] = ids[row, chosen]
        ids[row, chosen] = _MASK
    return {
        "input_ids": ids,
        "input_mask": mask,
        "segment_ids": segments,
        "masked_lm_positions": positions,
        "masked_lm_ids": labels,
        # Three to one: with equally many of each, the gradient of their bias is a small difference of large numbers.
        "next_sentence_labels": (np.arange(rows) % 4 == 3).astype(np.uint8),
    }


def write_sample(directory: Path, rows: dict[str, NDArray[np.generic]]) -> None:
    """Write `rows` as the only training shard of a data set."""
    directory.mkdir(parents=True)
    write_shard(directory / "sample_training_0.hdf5", rows)
