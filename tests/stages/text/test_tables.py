"""Parquet and Arrow: which rows are documents, what is refused, and how much memory they take."""

from __future__ import annotations

import bz2
import gzip
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from common.errors import UserError
from common.hashing import InputHashes
from common.zstd import zstd
from stages.text.base import FileSource
from stages.text.corpus import open_sources, raw_documents
from tests.fixtures.tables.make import HERE, TEXTS
from tests.helpers.corpora import WAYS, table_of, write_table
from tests.helpers.support import command, flip_a_byte

PACKERS: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".bz2": bz2.compress, ".zst": zstd.compress}
ARROW = [way for way in WAYS if not way.endswith(".parquet")]
#: Documents of every kind: with line ends, control characters only, empty, too long.
ODD = [
    "One. Two!\n\nThree\r\nFour",
    " café 中 \U0001f600",
    "",
    " \n\x00",
    "word " * 300_000 + "\u2028" + "x" * (1 << 20) + "y",
    *(f"Document {number} of many." for number in range(300)),
]


def read(*paths: object) -> tuple[list[str], Counter[str]]:
    dropped: Counter[str] = Counter()
    found = list(raw_documents(open_sources(map(str, paths), InputHashes()), dropped))
    return [str(text) for text in found], dropped


def refused(path: Path) -> str:
    with pytest.raises(UserError) as error:
        read(path)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(str(path))
    return str(error.value)


def opened(path: Path) -> FileSource:
    (source,) = open_sources([str(path)], InputHashes())
    assert isinstance(source, FileSource)
    return source


@pytest.mark.parametrize(
    ("name", "nulls"),
    [
        ("datasets.arrow", 1), ("datasets.parquet", 1), ("datatrove.parquet", 0), ("datatrove.jsonl.gz", 0),
        ("datatrove.jsonl.zst", 0),
    ],
)  # fmt: skip
def test_what_other_libraries_left_is_read(name: str, nulls: int) -> None:
    assert (HERE / name).stat().st_size < 20_000
    found, dropped = read(HERE / name)
    assert found == ["\n".join(line for line in text.split("\n") if line) for text in TEXTS]
    assert +dropped == Counter({"documents: null": nulls} if nulls else {})


@pytest.mark.parametrize("way", WAYS)
def test_rows_are_the_documents_of_json_lines(tmp_path: Path, way: str) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in ODD))
    found, dropped = read(lines)
    assert len(found) > 300
    assert {"documents: no text", "line ends: cut, too long"} <= set(dropped)
    assert read(write_table(tmp_path / way, table_of(ODD))) == (found, dropped)


@pytest.mark.parametrize("packing", PACKERS)
@pytest.mark.parametrize("way", ["stream.arrow", "file.arrow", "v2.feather"])
def test_packed_tables_are_the_same(tmp_path: Path, way: str, packing: str) -> None:
    plain = write_table(tmp_path / way, table_of(ODD))
    packed = plain.with_name(way + packing)
    packed.write_bytes(PACKERS[packing](plain.read_bytes()))
    assert read(packed) == read(plain)
    whole = packed.read_bytes()
    packed.write_bytes(whole[: len(whole) // 2])
    assert "is damaged or cut: it cannot be unpacked beyond" in refused(packed)
    packed.write_bytes(PACKERS[packing](plain.read_bytes()[: plain.stat().st_size // 2]))
    assert "cannot be read as Arrow beyond row" in refused(packed)


@pytest.mark.parametrize("way", ["zstd.parquet", "stream.arrow", "v2.feather"])
@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())], ids=str)
def test_strings_may_be_stored_in_any_way(tmp_path: Path, way: str, kind: pa.DataType) -> None:
    texts = ["Again and again.", None, "Another."] * 100
    written = write_table(tmp_path / way, table_of(["Again and again.", None, "Another."] * 100, kind))
    found, dropped = read(written)
    assert found == [text for text in texts if text]
    assert dropped == {"documents: null": 100}


def cases() -> dict[str, tuple[pa.Table, str]]:
    """What a table may hold other than one column of strings, and the message."""
    rows = table_of(["One.", "Two."])
    twice = pa.Table.from_arrays([rows["text"], rows["text"]], ["text", "text"])
    wide = pa.table({f"column {number}": [1] for number in range(30)})
    return {
        "no column": (rows.rename_columns(["id", "metadata", "content", "score"]),
                      "has no columns called text; it has id, metadata, content, score: the one that holds"),
        "many columns": (wide, "column 18, column 19, …: the one that holds the documents must be called text"),
        "two": (twice, "has 2 columns called text; it has text, text: "),
        "numbers": (pa.table({"text": [1, 2]}), "the column text is of type int64; it must hold strings"),
        "bytes": (pa.table({"text": [b"One."]}), "the column text is of type binary; it must hold strings"),
        "lists": (pa.table({"text": [["One."]]}), "the column text is of type list<"),
        "nothing": (pa.table({"text": pa.array([None], pa.null())}), "the column text is of type null"),
        "no rows": (table_of([]), "holds no text: it is empty"),
        "no text": (table_of([None, "", " \x00"]),
                    "holds no text: nothing was left (documents: no text 2, documents: null 1, lines: control char"),
    }  # fmt: skip


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize("way", ["plain.parquet", "stream.arrow", "file.arrow"])
def test_what_has_no_documents_is_refused_in_one_line(tmp_path: Path, way: str, case: str) -> None:
    rows, message = cases()[case]
    if case == "two" and way.endswith(".parquet"):
        message = "2 columns called text"
    assert message in refused(write_table(tmp_path / way, rows))


@pytest.mark.parametrize("way", WAYS)
def test_what_is_cut_or_no_table_is_refused_in_one_line(tmp_path: Path, way: str) -> None:
    path = write_table(tmp_path / way, table_of(ODD))
    whole = path.read_bytes()
    title = "Parquet" if way.endswith(".parquet") else "Arrow"
    for content in (
        b"", b"Plain text, no table.\n" * 9, whole[:-1], whole[:-8], whole[: len(whole) // 2], whole[:100],
        whole + b"something", whole + whole[::-1] if title == "Parquet" else whole + whole,
    ):  # fmt: skip
        path.write_bytes(content)
        assert f"{path} cannot be read as {title} beyond row " in refused(path)


def test_a_stream_that_ends_between_batches_is_cut(tmp_path: Path) -> None:
    """A writer that was stopped leaves such a file, and a reader of the format takes it as whole."""
    path = write_table(tmp_path / "stream.arrow", table_of(ODD), batch=100)
    path.write_bytes(path.read_bytes()[:-8])
    assert pa.ipc.open_stream(path.read_bytes()).read_all().num_rows == len(ODD)
    assert f"beyond row {len(ODD)}: its end marker is missing" in refused(path)


def test_an_edited_page_is_noticed_by_its_checksum(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    rows = table_of([f"Document {number:05d}." for number in range(2000)])
    parquet.write_table(rows, path, compression="none", use_dictionary=False, write_page_checksum=True)
    content = path.read_bytes()
    assert content.count(b"Document 01500.") == 1
    path.write_bytes(content.replace(b"Document 01500.", b"Document 91500."))
    assert "CRC checksum verification failed" in refused(path)


@pytest.mark.parametrize("way", ["plain.parquet", "stream.arrow", "file.arrow"])
def test_text_that_is_not_utf_8_is_refused(tmp_path: Path, way: str) -> None:
    good = pa.array([b"Good."] * 100 + [b"caf\xe9 noir"], pa.binary())
    texts = pa.Array.from_buffers(pa.string(), len(good), good.buffers())  # nothing checks the bytes
    assert "Invalid UTF8 sequence" in refused(write_table(tmp_path / way, pa.table({"text": texts})))


def test_packed_parquet_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    for packing in PACKERS:
        path = tmp_path / f"a.parquet{packing}"
        path.write_bytes(b"anything")
        with pytest.raises(UserError, match="Parquet is compressed inside, and is not read packed; unpack the file"):
            open_sources([str(path)], InputHashes())


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [write_table(tmp_path / way, table_of(ODD)) for way in ("plain.parquet", "stream.arrow")]
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # as if it were not installed
    for path in paths:
        assert "install pyarrow, or in a checkout the extra that has it: pip install -e '.[parquet]'" in refused(path)


@pytest.mark.parametrize("way", ["zstd.parquet", "one-group.parquet", "stream.arrow", "one-batch.arrow", "v2.feather"])
@pytest.mark.parametrize("how", ["edit", "cut"])
def test_a_change_of_a_table_that_is_being_read_is_noticed(tmp_path: Path, way: str, how: str) -> None:
    texts = [os.urandom(2000).hex() for _ in range(2000)]  # 8 MB
    path = write_table(tmp_path / way, table_of(texts))
    documents = raw_documents(open_sources([str(path)], InputHashes()), Counter())
    assert next(documents) == texts[0]
    if how == "edit":
        flip_a_byte(path)
    else:
        os.truncate(path, 1000)  # memory that was mapped disappears
    with pytest.raises(UserError, match=f"{way} was changed while it was in use"):
        list(documents)


@pytest.mark.parametrize("way", [*WAYS, "stream.arrow.zst", "one-batch.arrow.gz"])
def test_a_table_knows_how_far_it_is(tmp_path: Path, way: str) -> None:
    name, dot, packing = way.partition("arrow.")
    path = write_table(
        tmp_path / (name + "arrow" if packing else way), table_of([os.urandom(500).hex() for _ in range(3000)])
    )
    if packing:
        packed = path.with_name(way)
        packed.write_bytes(PACKERS["." + packing](path.read_bytes()))
        path = packed
    source = opened(path)
    positions = [source.position for _ in source.documents(Counter())]
    assert len(positions) == 3000
    assert positions == sorted(positions)
    assert positions[0] == 0
    assert positions[-1] < source.position == source.size
    shares = [(n / len(positions), position / source.size) for n, position in enumerate(positions)]
    # Behind by 64 rows, or by what was unpacked ahead of them; the file's own headers and index are not rows.
    assert all(-0.1 < real - said < (0.5 if packing else 0.1) for real, said in shares)


#: Prints the peak memory that pyarrow and Python allocated, after reading a source in a process of its own.
_PEAK = """
import sys, tracemalloc
from collections import Counter
import pyarrow
from common.hashing import InputHashes
from stages.text.corpus import open_sources, raw_documents
tracemalloc.start()
documents = sum(1 for _ in raw_documents(open_sources(sys.argv[1:], InputHashes()), Counter()))
print(documents, pyarrow.default_memory_pool().max_memory() + tracemalloc.get_traced_memory()[1])
"""


@pytest.mark.parametrize("way", ["one-group.parquet", "zstd.parquet", "one-batch.arrow", "stream.arrow", "v2.feather"])
def test_memory_does_not_grow_with_a_table(tmp_path: Path, way: str) -> None:
    """80 MB in one row group or batch, half of it a column that is not read."""
    rows = pa.table(
        {
            "embedding": [os.urandom(2000) for _ in range(20_000)],
            "text": [os.urandom(1000).hex() for _ in range(20_000)],
        }
    )
    path = write_table(tmp_path / way, rows, batch=1000)
    assert path.stat().st_size > 50_000_000
    done = command("-c", _PEAK, str(path))
    assert done.returncode == 0, done.stderr
    documents, peak = map(int, done.stdout.split())
    assert documents == 20_000
    assert peak < 16_000_000
