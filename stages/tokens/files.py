"""Tokenized text on disk: the parts of a corpus, each an HDF5 file with the concatenated ids of its documents.

`tokens` (tokens,) uint16 or uint32; `sentence_lengths` (sentences,) in tokens; `document_lengths` (documents,) in
sentences. Every sentence has at least one token, every document at least one sentence.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.errors import UserError
from trainer.data.hdf5 import Array, contiguous_file, map_contiguous, open_hdf5

TRAINING, TEST = SPLITS = ("training", "test")

_KEYS = ("tokens", "sentence_lengths", "document_lengths")


@dataclass(frozen=True)
class Tokens:
    """Documents as ids, and their counts."""

    tokens: Array
    sentence_lengths: Array
    document_lengths: Array
    #: Keys: documents, sentences, tokens, unknown; "dropped <reason>" for what was dropped.
    counts: dict[str, int]


def part_path(directory: Path, split: str, number: int) -> Path:
    return directory / f"tokens_{split}_{number:05d}.hdf5"


def part_paths(directory: Path, split: str) -> list[Path]:
    return sorted(directory.glob(f"tokens_{split}_*.hdf5"))


def write_part(path: Path, batches: list[Tokens]) -> None:
    """Write `batches` as one part; raises `DiskError`."""
    counts: Counter[str] = Counter()
    for batch in batches:
        counts.update(batch.counts)
    arrays = {key: [getattr(batch, key) for batch in batches] for key in _KEYS}
    layout = {key: ((sum(map(len, values)),), values[0].dtype) for key, values in arrays.items()}
    with contiguous_file(path, layout, attributes={"counts": json.dumps(counts, sort_keys=True)}) as writer:
        for key, values in arrays.items():
            start = 0
            for value in values:
                writer.write(key, start, value)
                start += len(value)


def part_counts(path: Path) -> Counter[str]:
    """The counts that `write_part` recorded in a part."""
    with open_hdf5(path) as file:
        return Counter(json.loads(file.attrs["counts"]))


def read_part(path: Path) -> dict[str, Array]:
    """Memory-map the three datasets of a part; raises `UserError` if they are missing or inconsistent."""
    with open_hdf5(path) as file:
        mapped = map_contiguous(path, file, _KEYS)
    if mapped is None:
        raise UserError(f"{path} is not a part of this program's tokens; run stages.tokenize again")
    arrays = mapped.arrays
    sentences, documents = arrays["sentence_lengths"], arrays["document_lengths"]
    if sentences.sum(dtype=np.int64) != len(arrays["tokens"]) or documents.sum(dtype=np.int64) != len(sentences):
        raise UserError(f"{path} was altered: its lengths contradict each other; run stages.tokenize again")
    return arrays


def tokens_of_documents(paths: Iterable[Path]) -> NDArray[np.int64]:
    """How many documents of these parts have 0, 1, 2, … tokens, (longest + 1,); empty without documents."""
    found = np.zeros(0, np.int64)
    for path in paths:
        part = read_part(path)
        ends = np.cumsum(part["document_lengths"], dtype=np.int64)
        lengths = np.add.reduceat(part["sentence_lengths"], np.append(0, ends)[:-1], dtype=np.int64)
        counts = np.bincount(lengths, minlength=len(found))
        counts[: len(found)] += found
        found = counts
    return found


def document_digests(tokens: Array, sentence_lengths: Array, document_lengths: Array) -> list[bytes]:
    """The sha256 of each document's ids, regardless of its sentences and the dtype; arrays as in `Tokens`."""
    ends = np.cumsum(sentence_lengths, dtype=np.int64)[np.cumsum(document_lengths, dtype=np.int64) - 1]
    ids = tokens.astype("<u4")
    starts = np.append(0, ends)[:-1]
    return [hashlib.sha256(ids[start:end].tobytes()).digest() for start, end in zip(starts, ends, strict=True)]


def total_counts(paths: Iterable[Path]) -> Counter[str]:
    totals: Counter[str] = Counter()
    for path in paths:
        totals.update(part_counts(path))
    return totals
