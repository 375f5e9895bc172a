"""Small made-up corpora: tokenized ones, and tables as pyarrow writes them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import feather, parquet

from common.hashing import InputHashes
from stages.directory.manifest import StageDirectory
from stages.text.base import text_of
from stages.text.corpus import TokenizeOptions, open_sources, raw_documents
from stages.text.sentences import sentences
from stages.tokens import parts
from stages.tokens.encode import tokenize_corpus

#: Ways to write a table, by the names of their files.
WAYS = (
    *("snappy.parquet", "zstd.parquet", "plain.parquet", "one-group.parquet"),
    *("stream.arrow", "stream-lz4.arrow", "file.arrow", "one-batch.arrow", "file-zstd.arrow", "v2.feather"),
)


def documents(spec: object) -> Iterator[list[str]]:
    """One source's documents as lists of sentences."""
    dropped: Counter[str] = Counter()
    for document in raw_documents(open_sources([str(spec)], InputHashes()), dropped):
        if found := sentences(text_of(document, dropped)):
            yield found


def make_tokens(directory: Path, *, documents: int, held_out: float = 0.1) -> Path:
    """A tokenized corpus of several parts, each document with its own words."""
    draw = random.Random(0)
    text = []
    for _ in range(documents):
        words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 6))) for _ in range(30)]
        text += [" ".join(draw.choices(words, k=draw.randint(3, 12))) for _ in range(draw.randint(2, 15))] + [""]
    path = directory.with_suffix(".txt")
    path.write_text("\n".join(text))
    options = TokenizeOptions(sources=(str(path),), vocab_size=120, held_out=held_out)
    with StageDirectory.begin(directory, options.identity) as work, pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "_PART_CHARACTERS", 8_000)
        tokenize_corpus(work, options, processes=1)
    return directory


def table_of(texts: Sequence[str | None], kind: Any = None) -> pa.Table:
    """The texts, among other columns that a data set has."""
    count = len(texts)
    columns = {
        "id": pa.array([f"<urn:{number}>" for number in range(count)]),
        "metadata": pa.array([{"url": "https://example.org", "score": [0.5, float(n)]} for n in range(count)]),
        "text": pa.array(texts, kind or pa.string()),
        "score": pa.array([1.0] * count),
    }
    return pa.table(columns)


def write_table(path: Path, rows: pa.Table, *, batch: int = 50) -> Path:
    """Write the table as its file name, one of `WAYS`, says; `batch`: rows per record batch or row group."""
    way = path.name
    if way.endswith(".parquet"):
        size = rows.num_rows if way.startswith("one") else batch
        compression = next((name for name in ("snappy", "zstd") if name in way), "none")
        parquet.write_table(rows, path, row_group_size=max(size, 1), compression=compression)
    elif way.endswith(".feather"):
        feather.write_feather(rows, path, chunksize=batch)
    else:
        packed = next((name for name in ("lz4", "zstd") if name in way), None)
        options = pa.ipc.IpcWriteOptions(compression=packed)
        new = pa.ipc.new_stream if way.startswith("stream") else pa.ipc.new_file
        with new(path, rows.schema, options=options) as writer:
            writer.write_table(rows.combine_chunks(), None if way.startswith("one") else batch)
    return path
