"""Reads all of a shard once, and checks every value in it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from common.errors import UserError
from trainer.data.hdf5 import Array, open_hdf5
from trainer.data.shards import LENGTHS_KEY, bad_value, shape_of

#: Most rows, and most values of one dataset, that are read at a time.
_VALIDATED_ROWS, _VALIDATED_VALUES = 8192, 8192 * 1024


def validate_file(
    path: Path, *, seq_len: int | None = None, max_pred_len: int | None = None, vocab_size: int | None = None
) -> int:
    """Read all of a shard and check it; returns its row count. None leaves a limit open (`seq_len`: as in the file).

    Raises `UserError` that names file, key, row and value.
    """
    with open_hdf5(path) as file:
        shape = shape_of(path, file, seq_len=seq_len, max_pred_len=max_pred_len)
        rows, S = shape.rows, shape.seq_len
        limits = value_limits(S, vocab_size)
        at_once = max(1, min(_VALIDATED_ROWS, _VALIDATED_VALUES // max(S, 1)))
        for start in range(0, rows, at_once):
            for key in shape.keys:
                limit = limits.get(key)
                values: Array = file[key][start : start + at_once]
                if not values.size:
                    continue
                if values.min() < 0 or (limit is not None and values.max() >= limit):
                    wrong = values < 0 if limit is None else (values < 0) | (values >= limit)
                    allowed = "0 or more" if limit is None else f"0 to {limit - 1}"
                    raise bad_value(path, key, values, wrong, start, allowed)
            if shape.sequences_per_row is not None:
                here = slice(start, start + at_once)
                _require_lengths(path, file[LENGTHS_KEY][here], file["input_mask"][here], start)
    return rows


def value_limits(seq_len: int, vocab_size: int | None) -> dict[str, int]:
    """The bound that the values of each dataset stay below; without a `vocab_size`, ids have none."""
    ids = {} if vocab_size is None else {"input_ids": vocab_size, "masked_lm_ids": vocab_size}
    flags = {"input_mask": 2, "segment_ids": 2, "next_sentence_labels": 2}
    return {**ids, **flags, "masked_lm_positions": seq_len, LENGTHS_KEY: seq_len + 1}


def _require_lengths(path: Path, lengths: Array, mask: Array, start: int) -> None:
    """Raise `UserError` unless packed sequences cover what `input_mask` calls tokens, with no gap between them."""
    total = lengths.sum(1, dtype=np.int64)
    is_right = ((np.arange(mask.shape[1]) < total[:, None]) == (mask != 0)).all(1)
    is_right &= (lengths[:, 0] > 0) & ((lengths[:, 1:] == 0) | (lengths[:, :-1] > 0)).all(1)
    if not is_right.all():
        row = int(is_right.argmin())
        raise UserError(
            f"{path}: {LENGTHS_KEY} {lengths[row].tolist()} of row {start + row} do not fit its input_mask with "
            f"{int((mask[row] != 0).sum())} tokens; make this file again"
        )
