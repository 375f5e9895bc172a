"""Documents that workers find in a file are the same as one process reads, wherever chunks and blocks end."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from common.hashing import InputHashes
from common.workers import Workers
from stages.text import base, jsonl, plain, spans
from stages.text.corpus import open_sources, raw_documents
from stages.text.spans import TextSpan, texts_of

#: Lines of the kinds that matter: text of one to four bytes per character, Unicode white space, invisible characters.
LINES = [
    *("One sentence.", "zwei Sätze. Ünd", "三个字。", "😀 four bytes", "–", "tab\tinside", "\x0bvertical", "a" * 90),
    *("", "", "", " \t", "\u3000", "\u00a0\u2003", "\x1c", "\u2028"),
    *("\u200b", "\ufeff", "\x00\x01", "\u2060\x7f", "\u0080"),
]  # fmt: skip


class InThisProcess(Workers):
    """Finds what several workers would find."""

    def __init__(self) -> None:
        super().__init__(2)

    def map(self, function: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[Any]:
        return map(function, tasks)


def read(*paths: object, workers: Workers | None, document: str = "blank_line") -> tuple[list[str], list[int], Any]:
    """The texts, the lengths by which parts are cut, and what was dropped: all of these determine the bytes."""
    sources = open_sources(map(str, paths), InputHashes(), document=document)
    dropped: Counter[str] = Counter()
    found = list(raw_documents(sources, dropped, workers))
    assert all(source.position == source.size for source in sources)
    return list(texts_of(found, Counter())), list(map(len, found)), dropped


def assert_the_same(*paths: object, document: str = "blank_line") -> list[str]:
    expected = read(*paths, workers=None, document=document)
    assert read(*paths, workers=InThisProcess(), document=document) == expected
    return expected[0]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the sizes of chunks, blocks, lines and documents."""

    def set_sizes(*, chunk: int, block: int, line: int = 1 << 20, document: int = 4 << 20) -> None:
        monkeypatch.setattr(spans, "_CHUNK_BYTES", chunk)
        monkeypatch.setattr(base, "_BLOCK_BYTES", block)
        monkeypatch.setattr(plain, "_LINE_BYTES", line)
        for module in (base, plain, jsonl, spans):
            monkeypatch.setattr(module, "DOCUMENT_CHARACTERS_MAX", document)

    return set_sizes


def some_text(draw: random.Random) -> bytes:
    end = draw.choice(["\n", "\n", "\r\n"])
    text = end.join(draw.choices(LINES, k=draw.randrange(1, 40))) + draw.choice(["", end, end * 3])
    return (b"\xef\xbb\xbf" * draw.choice([0, 0, 0, 1, 2])) + text.encode()


@pytest.mark.parametrize("document", ["blank_line", "file"])
def test_any_text_in_chunks_of_any_size(tmp_path: Path, small: Callable[..., None], document: str) -> None:
    """Chunks that end inside a character, inside a CRLF, between blank lines; documents that span several; lines and
    documents that are cut, which depends on where blocks end."""
    draw = random.Random(1)
    cut = 0
    for number in range(150):
        path = tmp_path / f"{number}.txt"
        path.write_bytes(b"Text.\n\n" + some_text(draw) if document == "blank_line" else b"Text.\n" + some_text(draw))
        block = draw.choice([4, 16, 50, 1 << 20])
        small(
            chunk=draw.choice([1, 2, 3, 7, 20, 64, 1000]),
            block=block,
            line=max(block, draw.choice([4, 30, 64])),  # as in the source: a line is not cut before it fills a block
            document=draw.choice([10, 60, 200, 4 << 20]),
        )
        before = read(path, workers=None, document=document)
        assert read(path, workers=InThisProcess(), document=document) == before, path.read_bytes()
        cut += any("cut" in reason for reason in before[2])
        path.unlink()
    assert 20 < cut < 130  # both cases occurred


def test_most_documents_are_places_not_texts(tmp_path: Path, small: Callable[..., None]) -> None:
    small(chunk=100, block=1 << 20, document=500)
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(["A short one.\nOf two lines."] * 50 + ["Long. " * 200] + ["The last."]))
    found = list(raw_documents(open_sources([str(path)], InputHashes()), Counter(), InThisProcess()))
    assert [isinstance(document, TextSpan) for document in found] == [True] * 50 + [False] + [True]
    assert found[0].text(Counter()) == "A short one.\nOf two lines."  # type: ignore[union-attr]


def test_records_of_json_lines(tmp_path: Path, small: Callable[..., None]) -> None:
    draw = random.Random(2)
    for _ in range(40):
        texts = ["\n".join(draw.choices(LINES, k=draw.randrange(1, 9))) for _ in range(draw.randrange(1, 30))]
        lines = [json.dumps({"id": 1, "text": text + "\ud800" * (draw.random() < 0.1)}) for text in ["Text.", *texts]]
        path = tmp_path / "a.jsonl"
        path.write_text(draw.choice(["\n", "\r\n", "\n\n"]).join(lines) + draw.choice(["", "\n", " \n"]))
        small(
            chunk=draw.choice([1, 10, 100, 1000]), block=draw.choice([8, 64, 1 << 20]), document=draw.choice([20, 999])
        )
        assert_the_same(path)


def test_many_files_of_all_kinds_in_their_order(tmp_path: Path, small: Callable[..., None]) -> None:
    small(chunk=300, block=1 << 20)
    for number in range(700):
        (tmp_path / f"{number:03}.txt").write_text("" if number % 5 == 0 else f"Tiny file {number}.\n\nAgain.")
    (tmp_path / "100.txt.gz").write_bytes(gzip.compress(b"Packed.\n\nTwice."))
    (tmp_path / "200.jsonl").write_text('{"text": "A record."}\n')
    (tmp_path / "300.txt").write_text("A long file.\n\n" * 100)
    texts = assert_the_same(tmp_path / "*")
    assert (
        texts.index("Packed.") < texts.index("A record.") < texts.index("A long file.") < texts.index("Tiny file 301.")
    )


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", b"Fine.\n\nAlso fine.\n\n" * 30 + b"\xff\n\n"),
        ("a.txt", b"Fine.\n\n" * 30 + "cut in a ch\u00e4".encode()[:-1]),
        ("a.txt", b"Fine.\n\nIn a document.\n\xc3\n\nFine."),
        ("a.txt", b"\n \n\x00\n"),
        ("a.jsonl", b'{"text": "Fine."}\n' * 40 + b"{\n"),
        ("a.jsonl", b'{"text": "Fine."}\n' * 40 + b'{"text": 1}\n{"text": "More."}'),
        ("a.jsonl", b'{"text": "Fine."}\n' * 40 + b'{"text": "\xff"}\n'),
        ("a.jsonl", b'{"text": "Fine."}\n\n{"text": "' + b"a" * (17 << 20) + b'"}'),
    ],
)
def test_bad_files_are_refused_in_the_same_words(
    tmp_path: Path, small: Callable[..., None], name: str, content: bytes
) -> None:
    if len(content) < 1 << 20:
        small(chunk=50, block=64)
    path = tmp_path / name
    path.write_bytes(content)
    said = []
    for workers in (None, InThisProcess()):
        with pytest.raises(UserError) as error:
            read(path, workers=workers)
        said.append(str(error.value))
    assert said[0] == said[1]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
@pytest.mark.parametrize("when", ["before", "between"])
def test_a_file_that_changes_is_refused(tmp_path: Path, small: Callable[..., None], name: str, when: str) -> None:
    """Even when it changes after its documents were found and before they are read."""
    small(chunk=50, block=64)
    path = tmp_path / name
    path.write_text('{"text": "Fine."}\n\n' * 40)
    sources = open_sources([str(path)], InputHashes())
    if when == "before":
        path.write_text('{"text": "Mine."}\n\n' * 40)
    refused = pytest.raises(UserError, match="was changed while it was in use")
    if when == "before":
        with refused:
            list(raw_documents(sources, Counter(), InThisProcess()))
        return
    found = list(raw_documents(sources, Counter(), InThisProcess()))
    path.write_text('{"text": "Mine."}\n\n' * 40)
    with refused:
        list(texts_of(found, Counter()))


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("Text.\n\nMore.")
    sources = open_sources([str(tmp_path / "*")], InputHashes())
    (tmp_path / "b.txt").unlink()
    with pytest.raises(UserError, match=r"cannot read .*b\.txt: No such file"), Workers(2) as workers:
        list(raw_documents(sources, Counter(), workers))
