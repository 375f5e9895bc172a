"""The shards of a data set: HDF5 files with NVIDIA's six keys, read and written here and checked once.

input_ids, input_mask, segment_ids (N, S); masked_lm_positions, masked_lm_ids (N, P), zero-padded;
next_sentence_labels (N,). Packed rows hold several sequences, one after another: sequence_lengths (N, K) has their
lengths, zero-padded, and next_sentence_labels (N, K) their labels; all else is as for one long sequence. Rows that are
masked whenever they are read lack the two masked_lm keys; those made for masked-LM alone, with one segment, lack
next_sentence_labels.

Ours are contiguous and uncompressed with small unsigned dtypes, and are read row by row through a memory map. Other
tools' (chunked, gzip'd, int32) are decoded a shard at a time. Imports no torch.
"""

from __future__ import annotations

import fnmatch
import json
import os
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import UserError
from trainer.data.file_names import TRAINING_SHARDS
from trainer.data.hdf5 import (
    Array,
    Layout,
    MappedDatasets,
    contiguous_file,
    map_contiguous,
    open_hdf5,
    require_own_dataset,
)

TOKEN_KEYS = ("input_ids", "input_mask", "segment_ids")
MASKED_KEYS = ("masked_lm_positions", "masked_lm_ids")
NEXT_SENTENCE_KEY = "next_sentence_labels"
KEYS = (*TOKEN_KEYS, *MASKED_KEYS, NEXT_SENTENCE_KEY)
#: The key that packed shards have in addition.
LENGTHS_KEY = "sequence_lengths"

#: Mapped files kept open; each holds a file descriptor.
_MAPPED_FILES = 16
#: Memory for decoded shards of other tools; one block of `order` needs about 160 MB in phase 1 and 570 in phase 2.
_DECODED_BYTES = 1 << 30
#: Shards of other tools are unpacked whole; no sequence is longer than this, as positions have 16 bits.
_SHARD_BYTES_MAX, _SEQ_LEN_MAX = 16 << 30, 1 << 16
# Deflate compresses by at most 1,032 : 1; a file that claims to hold more than this cannot.
_UNPACKED_RATIO_MAX = 1100


def id_dtype(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    """The dtype in which token ids below `vocab_size` are stored."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


def shard_layout(
    rows: int,
    *,
    seq_len: int,
    max_pred_len: int,
    vocab_size: int,
    sequences_per_row: int,
    is_masked: bool,
    next_sentence: bool,
) -> Layout:
    """Shapes and dtypes of the datasets of a shard of ours."""
    ids = id_dtype(vocab_size)
    tokens, masked, packed = (rows, seq_len), (rows, max_pred_len), (rows, sequences_per_row)
    layout: dict[str, tuple[tuple[int, ...], Any]] = {
        "input_ids": (tokens, ids),
        "input_mask": (tokens, np.uint8),
        "segment_ids": (tokens, np.uint8),
        "masked_lm_positions": (masked, np.uint16),
        "masked_lm_ids": (masked, ids),
        NEXT_SENTENCE_KEY: (packed if sequences_per_row > 1 else (rows,), np.uint8),
        LENGTHS_KEY: (packed, np.uint16),
    }
    keys = _keys(is_masked=is_masked, is_packed=sequences_per_row > 1, next_sentence=next_sentence)
    return {key: layout[key] for key in keys}


def write_shard(path: Path, arrays: dict[str, Array]) -> None:
    """Write one shard, in the dtypes of `arrays`: whole, durable, and the same bytes for the same arrays.

    Raises: `DiskError`.
    """
    assert set(arrays) - {LENGTHS_KEY, NEXT_SENTENCE_KEY, *MASKED_KEYS} == set(TOKEN_KEYS), sorted(arrays)
    layout = {key: (arrays[key].shape, arrays[key].dtype) for key in (*KEYS, LENGTHS_KEY) if key in arrays}
    with contiguous_file(path, layout) as writer:
        for key in layout:
            writer.write(key, 0, arrays[key])


@dataclass(frozen=True)
class ShardShape:
    """What the rows of a shard are like."""

    rows: int
    seq_len: int
    #: Masked positions in a row, at most; None: the rows are not masked.
    max_pred_len: int | None
    #: Sequences in a packed row, at most; None: rows are not packed.
    sequences_per_row: int | None
    #: Whether the rows have next-sentence labels.
    next_sentence: bool

    @property
    def keys(self) -> tuple[str, ...]:
        return _keys(
            is_masked=self.max_pred_len is not None, is_packed=self.sequences_per_row is not None,
            next_sentence=self.next_sentence,
        )  # fmt: skip


def _keys(*, is_masked: bool, is_packed: bool, next_sentence: bool) -> tuple[str, ...]:
    return (
        *TOKEN_KEYS,
        *(MASKED_KEYS if is_masked else ()),
        *((NEXT_SENTENCE_KEY,) if next_sentence else ()),
        *((LENGTHS_KEY,) if is_packed else ()),
    )


class ShardSet:
    """The shards of one directory that match a pattern, in the order of their names. For one thread at a time."""

    def __init__(self, directory: Path, names: list[str], rows: NDArray[np.int64], first: ShardShape) -> None:
        """`first`: the shape of the first file; the others' are the same except for `rows`."""
        self.directory = directory
        self.names = names
        #: Rows of each shard, (shards,) int64.
        self.rows_per_shard = rows
        self.rows = int(rows.sum())
        self.seq_len = first.seq_len
        self.max_pred_len = first.max_pred_len
        self.sequences_per_row = first.sequences_per_row
        self.next_sentence = first.next_sentence
        self.keys = first.keys
        self._mapped: OrderedDict[int, MappedDatasets] = OrderedDict()
        self._decoded: OrderedDict[int, dict[str, Array]] = OrderedDict()

    @classmethod
    def open(
        cls, directory: Path, pattern: str = TRAINING_SHARDS, *, seq_len: int | None = None,
        max_pred_len: int | None = None,
    ) -> ShardSet:  # fmt: skip
        """Find the shards; only the first is opened if the directory's manifest gives the row counts.

        Raises `UserError`: no directory, no matching file, a file that cannot be used, lengths other than asked for
        (`max_pred_len` is an upper limit).
        """
        absent = f"there is no data set directory {directory}; make the data set, or name another directory"
        try:
            there = {entry.name for entry in os.scandir(directory)}
            known = _recorded_rows(directory)
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(absent) from None
        except OSError as error:
            raise UserError(f"cannot read the data set {directory}: {error}; check the permissions") from error
        missing = sorted(fnmatch.filter(known.keys() - there, pattern))
        if missing:
            raise UserError(f"{directory / missing[0]} is in the manifest but missing; make the data set again")
        names = sorted(fnmatch.filter(there, pattern))
        if not names:
            raise UserError(f"no file in {directory} matches {pattern}; it is not a data set, or has another form")
        first = file_shape(directory / names[0], seq_len=seq_len, max_pred_len=max_pred_len)
        limits = {"seq_len": first.seq_len, "max_pred_len": max_pred_len}
        rows = [known[name] if name in known else file_shape(directory / name, **limits).rows for name in names]
        return cls(directory, names, np.array(rows, np.int64), first)

    def read(self, shard: int, rows: NDArray[np.int64]) -> dict[str, Array]:
        """Copies of `rows` of the datasets (`keys`) of shard number `shard`, in their stored (or smaller) dtypes;
        raises `UserError` if the file cannot be read or has changed."""
        arrays = self._arrays(shard)
        return {key: arrays[key][rows] for key in self.keys}

    def _arrays(self, shard: int) -> dict[str, Array]:
        if shard in self._mapped:
            self._mapped.move_to_end(shard)
            return self._mapped[shard].checked()
        if shard in self._decoded:
            self._decoded.move_to_end(shard)
            return self._decoded[shard]
        path = self.directory / self.names[shard]
        with open_hdf5(path) as file:
            shape = shape_of(path, file, seq_len=self.seq_len, max_pred_len=None)
            if shape.sequences_per_row != self.sequences_per_row:
                raise UserError(
                    f"{path} holds at most {shape.sequences_per_row or 1} sequences a row, {self.names[0]} at most "
                    f"{self.sequences_per_row or 1}; make the data set again"
                )
            if shape.next_sentence != self.next_sentence:
                have = "has" if shape.next_sentence else "lacks"
                raise UserError(f"{path} {have} {NEXT_SENTENCE_KEY}, unlike {self.names[0]}; make the data set again")
            if shape.rows != self.rows_per_shard[shard] or self.max_pred_len != shape.max_pred_len:
                raise UserError(
                    f"{path} holds {shape.rows} rows with {shape.max_pred_len} predictions; expected "
                    f"{self.rows_per_shard[shard]} rows as in the manifest and {self.max_pred_len} predictions as in "
                    f"{self.names[0]}; make the data set again"
                )
            mapped = map_contiguous(path, file, self.keys)
            if mapped is not None:
                while len(self._mapped) >= _MAPPED_FILES:
                    self._mapped.popitem(last=False)
                self._mapped[shard] = mapped
                return mapped.arrays
            decoded = {key: _decode(path, key, file) for key in self.keys}
        self._decoded[shard] = decoded
        while (
            len(self._decoded) > 1
            and sum(a.nbytes for d in self._decoded.values() for a in d.values()) > _DECODED_BYTES
        ):
            self._decoded.popitem(last=False)
        return decoded


def _recorded_rows(directory: Path) -> dict[str, int]:
    """Rows by file name from the directory's manifest, or {} if there is none or it does not give them."""
    try:
        rows = json.loads((directory / "manifest.json").read_bytes())["counts"]["rows"]
        return {str(name): int(count) for name, count in rows.items()}
    except (FileNotFoundError, KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return {}


def _decode(path: Path, key: str, file: Any) -> Array:
    """All of one dataset in the smallest unsigned dtype that holds it; raises `UserError` on a negative value."""
    values: Array = file[key][()]
    if not values.size:
        return values.astype(np.uint16)
    low, high = int(values.min()), int(values.max())
    if low < 0:
        raise bad_value(path, key, values, values < 0, 0, "0 or more")
    return values.astype(np.uint8 if high < 1 << 8 else np.uint16 if high < 1 << 16 else np.uint32)


def file_shape(path: Path, *, seq_len: int | None, max_pred_len: int | None) -> ShardShape:
    """The shape of a shard; raises `UserError` if it is not one, or not of the lengths asked for."""
    with open_hdf5(path) as file:
        return shape_of(path, file, seq_len=seq_len, max_pred_len=max_pred_len)


def shape_of(path: Path, file: Any, *, seq_len: int | None, max_pred_len: int | None) -> ShardShape:
    next_sentence = NEXT_SENTENCE_KEY in file
    is_masked, is_packed = any(key in file for key in MASKED_KEYS), LENGTHS_KEY in file
    keys = _keys(is_masked=is_masked, is_packed=is_packed, next_sentence=next_sentence)
    for key in keys:
        if key not in file:
            raise UserError(f"{path} has no dataset {key}; a shard has {', '.join(KEYS)}")
        require_own_dataset(path, file, key)
        if file[key].dtype.kind not in "iu":
            raise UserError(f"{path}: {key} is not a dataset of integers; this is no shard of token ids")
    shapes = {key: tuple(file[key].shape) for key in keys}
    masked_shape = shapes.get("masked_lm_ids")
    if len(shapes["input_ids"]) != 2 or (masked_shape is not None and len(masked_shape) != 2):
        raise UserError(
            f"{path}: input_ids has shape {shapes['input_ids']} and masked_lm_ids {masked_shape}; "
            f"both must have 2 dimensions; this is no shard"
        )
    (rows, S), P = shapes["input_ids"], None if masked_shape is None else masked_shape[1]
    K = shapes[LENGTHS_KEY][1] if len(shapes.get(LENGTHS_KEY, ())) == 2 else None
    for key in keys:
        of_sequences = (rows,) if K is None else (rows, K)
        expected = (rows, S) if key in TOKEN_KEYS else (rows, P) if key in MASKED_KEYS else of_sequences
        if shapes[key] != expected:
            raise UserError(f"{path}: {key} has shape {shapes[key]}; expected {expected} beside input_ids {(rows, S)}")
    if seq_len is not None and seq_len != S:
        raise UserError(f"{path} has sequences of {S} tokens; {seq_len} were asked for; use another data set or length")
    if max_pred_len is not None and P is not None and max_pred_len < P:
        raise UserError(
            f"{path} has {P} predictions a sequence; at most {max_pred_len} were asked for; raise the limit to {P}"
        )
    _require_bounded(path, sum(file[key].nbytes for key in keys), rows, S, max(P or 0, K or 0))
    return ShardShape(rows, S, P, K, next_sentence)


def _require_bounded(path: Path, claimed: int, rows: int, seq_len: int, longest: int) -> None:
    """Raise `UserError` for sizes that no data set has: they would not fit into memory."""
    if claimed > _UNPACKED_RATIO_MAX * path.stat().st_size:
        raise UserError(f"{path} claims {rows} rows but is far too small to hold them; fetch or make it again")
    if claimed > _SHARD_BYTES_MAX:
        raise UserError(
            f"{path} unpacks to {claimed:,} bytes; at most {_SHARD_BYTES_MAX:,} are read; split it into more shards"
        )
    if max(seq_len, longest) > _SEQ_LEN_MAX:
        raise UserError(
            f"{path} has rows of {max(seq_len, longest)}; at most {_SEQ_LEN_MAX} are read; this is no shard"
        )


def bad_value(path: Path, key: str, values: Array, wrong: Array, start: int, allowed: str) -> UserError:
    first = tuple(int(i) for i in np.argwhere(wrong)[0])
    return UserError(
        f"{path}: {key} is {values[first]} in row {start + first[0]}; allowed: {allowed}; "
        f"fetch or make this file again, or check the vocabulary size"
    )
