"""Sources: what a document and a sentence are, and what is refused."""

from __future__ import annotations

import bz2
import glob
import gzip
import json
import os
import tracemalloc
from collections import Counter
from importlib import metadata
from pathlib import Path

import pytest

from common.errors import UserError
from common.hashing import InputHashes
from common.zstd import zstd
from stages.text import builtin
from stages.text.base import Document
from stages.text.builtin import PACKAGES
from stages.text.corpus import (
    BUILTIN,
    BuiltinSource,
    TokenizeOptions,
    open_sources,
    raw_documents,
)
from stages.text.patterns import expand
from stages.text.sentences import sentences
from tests.helpers.corpora import documents


def read(*specs: object, document: str = "blank_line") -> tuple[list[str], Counter[str]]:
    dropped: Counter[str] = Counter()
    sources = open_sources(map(str, specs), InputHashes(), document=document)
    found: list[Document] = list(raw_documents(sources, dropped))
    assert all(isinstance(text, str) for text in found)
    return [str(text) for text in found], dropped


def refused(*specs: object) -> str:
    with pytest.raises(UserError) as error:
        read(*specs)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_blank_lines_part_documents_and_lines_part_sentences(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xef\xbb\xbf\n\nOne. Two!\r\nThree\r\n \t\r\n\n\nFour by Dr. Smith.\nFive")
    assert list(documents(path)) == [["One.", "Two!", "Three"], ["Four by Dr. Smith.", "Five"]]


def test_a_glob_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    for name in ("b.txt", "c.text", "a.txt"):
        (tmp_path / name).write_text(f"From {name}\n\nAgain {name}")
    found, _ = read(tmp_path / "*.txt")
    assert found == ["From a.txt", "Again a.txt", "From b.txt", "Again b.txt"]


def test_wikitext_loses_nothing_but_white_space(shared: Path) -> None:
    path = shared / "data/wikitext-2/valid.txt"
    found = list(documents(path))
    assert len(found) == 60  # as its README says
    assert "".join("".join("".join(document).split()) for document in found) == "".join(path.read_text().split())
    assert sum(map(len, found)) > 5000


def test_one_sentence_a_line_is_cut_further_only_where_a_sentence_ends(shared: Path) -> None:
    path = shared / "fixtures/nvidia_hdf5/text/stdlib_training_0.txt"
    lines = [line.strip() for line in path.read_text().split("\n") if line.strip()]
    found = [sentence for document in documents(path) for sentence in document]
    assert " ".join(found).split() == " ".join(lines).split()
    pieces = [sentence for line in lines for sentence in sentences(line)[:-1]]
    assert len(found) == len(lines) + len(pieces)
    assert len(pieces) < 0.2 * len(lines)
    assert sum(piece[-1] in ".!?" for piece in pieces) > 0.9 * len(pieces)


@pytest.mark.slow
def test_builtin_text_is_prose_without_duplicates_and_always_the_same() -> None:
    found, dropped = read(BUILTIN)
    assert found == read(BUILTIN)[0]
    assert len(found) > 300
    assert sum(map(len, found)) > 8_000_000
    paragraphs = [line for document in found for line in document.split("\n")]
    assert len(paragraphs) == len(set(paragraphs))
    assert dropped["paragraphs: seen before"] > 0
    text = "\n".join(found)
    # A few of the docstrings are themselves malformed.
    for markup in (">>> ", ":class:`", "``"):
        assert text.count(markup) < len(paragraphs) / 1000, markup
    for package in PACKAGES:
        assert package in text


def test_builtin_text_does_without_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin, "PACKAGES", ("networkx", "no-such-package"))
    assert builtin.packages() == {"networkx": metadata.version("networkx")}
    assert BuiltinSource().identity().endswith(f", networkx {metadata.version('networkx')}")


def test_long_lines_and_documents_are_cut_so_that_memory_stays_bounded(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    word = "wörd "
    path.write_text(word * 4_000_000)  # 24 MB without a line end
    tracemalloc.start()
    dropped: Counter[str] = Counter()
    lengths = [len(document) for document in raw_documents(open_sources([str(path)], InputHashes()), dropped)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 24_000_000
    assert max(lengths) < 6_000_000
    assert sum(lengths) >= 4_000_000 * len(word)
    assert dropped["line ends: cut, too long"] > 10
    assert dropped["document ends: cut, too long"] > 1


def test_a_cut_never_falls_inside_a_character(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("x" + "€" * 1_500_000)
    found, _ = read(path)
    assert "".join(found).replace("\n", "") == "x" + "€" * 1_500_000


def test_what_cannot_be_read_is_refused_in_one_line(tmp_path: Path) -> None:
    assert "none.txt matches no file" in refused(tmp_path / "none.txt")
    assert "*.txt matches no file" in refused(tmp_path / "*.txt")
    assert "is a folder" in refused(tmp_path)
    for name, content in (("empty", b""), ("controls", b"\x00\x01\x1b\n\x7f\n\n"), ("white", b" \n\t\n")):
        path = tmp_path / name
        path.write_bytes(content)
        assert f"{path} holds no text" in refused(path)
    path = tmp_path / "latin1.txt"
    path.write_bytes(b"plain line\n" * 200_000 + b"caf\xe9 noir\n")
    assert f"{path} is not UTF-8: byte 0xe9 at offset 2200003" in refused(path)
    assert f"source {path} is named 2 times" in refused(path, path)


def test_one_file_under_two_names_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy, or a hard link, is another file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("One.")
    (tmp_path / "copy.txt").write_text("One.")
    (tmp_path / "hard.txt").hardlink_to("a.txt")
    (tmp_path / "link").symlink_to("a.txt")
    assert read("a.txt", "copy.txt", "hard.txt")[0] == ["One."] * 3
    for other in ("./a.txt", tmp_path / "a.txt", "link"):
        assert f"source {other} is the same file as a.txt; name each file once" in refused("a.txt", other)


def test_training_text_is_not_held_out(tmp_path: Path) -> None:
    """Whatever the file's name: [corpus] source = data/*.txt, and held_out_source = data/valid.txt. Empty files are
    alike."""
    for name, text in (("train.txt", "One."), ("valid.txt", "Two."), ("copy", "Two."), ("empty", ""), ("none.txt", "")):
        (tmp_path / name).write_text(text)
    glob = str(tmp_path / "*.txt")
    for held_out in ("valid.txt", "copy"):
        options = TokenizeOptions(sources=(glob,), held_out_sources=(str(tmp_path / held_out),))
        with pytest.raises(UserError) as error:
            options.identity()
        said = f"held-out source {tmp_path / held_out} has the same content as source {tmp_path / 'valid.txt'}; "
        assert str(error.value).startswith(said)
    (tmp_path / "valid.txt").write_text("Three.")
    apart = tuple(str(tmp_path / name) for name in ("copy", "empty"))
    assert TokenizeOptions(sources=(glob,), held_out_sources=apart).identity().inputs["held_out_sources"]


def test_files_without_text_are_counted_beside_others(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Text.\n\x00\x01\n\nMore.")
    (tmp_path / "b.txt").write_text("")
    found, dropped = read(tmp_path / "*.txt")
    assert found == ["Text.", "More."]
    assert dropped == {"files: no text in them": 1, "lines: control characters only": 1}


def test_a_dot_inside_a_name_ends_no_sentence() -> None:
    assert sentences("Call tkinter.Tk() or a.B. It works!Yes") == ["Call tkinter.Tk() or a.B.", "It works!Yes"]


def test_sentences_never_reach_over_lines() -> None:
    assert sentences("He came at 5 p.m. yesterday and\nleft. So it was") == [
        "He came at 5 p.m. yesterday and", "left.", "So it was",
    ]  # fmt: skip


def test_a_file_may_be_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("One.\n\nTwo.\n\x00\n\nThree.\n")
    (tmp_path / "b.txt").write_text("Four.")
    assert read(tmp_path / "*.txt", document="file")[0] == ["One.\nTwo.\nThree.", "Four."]
    assert read(tmp_path / "*.txt")[0] == ["One.", "Two.", "Three.", "Four."]


def test_a_document_of_one_sentence_is_one(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Only this.")
    assert list(documents(tmp_path / "a.txt")) == [["Only this."]]


def test_packed_text_is_the_same_text(tmp_path: Path) -> None:
    text = "".join(f"Document {n}, a line of it.\nAnother line.\n\n" for n in range(60_000)).encode()  # 2.6 MB
    (tmp_path / "a.txt").write_bytes(text)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text, 1))
    (tmp_path / "a.txt.bz2").write_bytes(bz2.compress(text))
    (tmp_path / "a.txt.zst").write_bytes(zstd.compress(text, 1))
    plain = read(tmp_path / "a.txt")
    assert len(plain[0]) == 60_000
    assert read(tmp_path / "a.txt.gz") == read(tmp_path / "a.txt.bz2") == read(tmp_path / "a.txt.zst") == plain
    for name, size in (("a.txt.gz", 0.5), ("a.txt.bz2", 0.5), ("a.txt.zst", 0.5)):
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[: int(len(whole) * size)])
        assert f"{tmp_path / name} is damaged or cut: it cannot be unpacked beyond" in refused(tmp_path / name)
        (tmp_path / name).write_bytes(b"not packed at all")
        assert f"{tmp_path / name} is damaged or cut" in refused(tmp_path / name)


def test_zst_files_have_frames_windows_and_checksums(tmp_path: Path) -> None:
    text = "".join(f"Document {n}, a line of it.\n\n" for n in range(1000)).encode()
    large = zstd.ZstdCompressor(
        options={zstd.CompressionParameter.window_log: 28, zstd.CompressionParameter.checksum_flag: 1}
    )
    packed = large.compress(text) + large.flush()
    with pytest.raises(zstd.ZstdError, match="too much memory"):
        zstd.decompress(packed)  # the zstd command refuses it, too, without --long=28
    (tmp_path / "a.txt.zst").write_bytes(packed + zstd.compress(b"Another.\n\n") + packed)
    found, _ = read(tmp_path / "a.txt.zst")
    assert len(found) == 2001
    assert found[1000] == "Another."
    (tmp_path / "a.txt.zst").write_bytes(packed[:-1] + bytes([packed[-1] ^ 1]))
    assert "cannot be unpacked beyond 0 bytes" in refused(tmp_path / "a.txt.zst")


def test_a_source_knows_how_far_it_is(tmp_path: Path) -> None:
    text = "".join(f"Document {n}, a line of it.\n\n" for n in range(200_000)).encode()  # 6 MB
    packed = {".gz": gzip.compress(text, 1), ".bz2": bz2.compress(text), ".zst": zstd.compress(text, 1)}
    for name, content in (("a.txt", text), *((f"a.txt{ending}", content) for ending, content in packed.items())):
        (tmp_path / name).write_bytes(content)
        (source,) = open_sources([str(tmp_path / name)], InputHashes())
        positions = [source.position for _ in source.documents(Counter())]
        assert positions == sorted(positions)
        assert positions[0] == 0
        assert positions[-1] < source.position == source.size
        # never ahead of the documents given, except by what zstd, and gzip since Python 3.12, read at a time: 128 KiB;
        # behind by two blocks at most, which are a third of this file
        shares = [(n / len(positions), position / source.size) for n, position in enumerate(positions)]
        ahead = 0.02 + (132_000 / source.size if name.endswith((".gz", ".zst")) else 0)
        assert all(-ahead < real - said < 0.5 for real, said in shares)


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [
        json.dumps({"text": "One. Two!\n\nThree\r\nFour", "id": 1}),
        json.dumps({"id": 2, "text": " caf\xe9 \u4e2d"}, ensure_ascii=False),
        "",
        json.dumps({"text": " \n\x00"}),
        '{"text": "half a character: \\ud83d, a whole one: \\ud83d\\ude00"}',
    ]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    found, dropped = read(path)
    assert found == ["One. Two!\nThree\nFour", " caf\xe9 \u4e2d", "half a character: \ufffd, a whole one: \U0001f600"]
    assert dropped == {"documents: no text": 1, "characters: half of one": 1, "lines: control characters only": 1}
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert read(tmp_path / "b.jsonl.gz") == (found, dropped)


def test_bad_json_lines_are_refused_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    good = b'{"text": "Good."}\n'
    for line, fragment in (
        (b"Plain text.", "line 3: it is not JSON: Expecting value"),
        (b'{"text": "cut', "line 3: it is not JSON: Unterminated string"),
        (b'{"txt": "x"}', 'line 3: no string "text" in it'),
        (b'{"text": ["x"]}', 'line 3: no string "text" in it'),
        (b'["text"]', 'line 3: no string "text" in it'),
        (b"[" * 200_000, "line 3: it is not JSON: "),
        (b'{"text": "caf\xe9"}', f"is not UTF-8: byte 0xe9 at offset {2 * len(good) + 13}"),
        (b'{"text": "' + b"x" * (17 << 20), f"has a line of more than 16 MiB at byte {2 * len(good)}"),
    ):
        path.write_bytes(good * 2 + line + b"\n" + good)
        message = refused(path)
        assert message.startswith(str(path))
        assert fragment in message


def test_long_texts_of_json_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "word " * 2_000_000}))
    found, dropped = read(path)
    assert "".join(found).replace("\n", "") == "word " * 2_000_000
    assert max(len(line) for document in found for line in document.split("\n")) <= 1 << 20
    assert max(map(len, found)) < 6_000_000
    assert dropped["document ends: cut, too long"] > 0


def test_the_identity_says_how_a_file_is_read(tmp_path: Path) -> None:
    line = '{"text": "One."}'
    for name in ("a.txt", "b.text", "a.jsonl", "a.xml", "a.xml-p1p9", "a.xml.txt", "a.parquet", "a.arrow", "a.feather"):
        (tmp_path / name).write_text(line)

    def identity(name: str, document: str = "blank_line") -> str:
        return TokenizeOptions(sources=(str(tmp_path / name),), document=document).identity().fingerprint

    assert identity("a.txt") == identity("b.text") == identity("a.xml.txt")
    kinds = ("a.txt", "a.jsonl", "a.xml", "a.parquet", "a.arrow")
    assert len({identity("a.txt", "file"), *map(identity, kinds)}) == 6
    assert identity("a.arrow") == identity("a.feather")
    assert identity("a.xml") == identity("a.xml-p1p9")
    assert identity("a.jsonl") == identity("a.jsonl", "file")  # it makes no difference there


@pytest.mark.parametrize(
    "pattern", ["*.txt", "*/*.txt", "**", "**/*.txt", "a/**/b.txt", "[ab]/c*", "*/b.txt", "./*.txt"]
)
def test_a_glob_names_the_regular_files_that_python_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    for name in ("b.txt", "a/b.txt", "a/c.txt", "a/d/e/b.txt", "b/c.md", ".hidden.txt", "a/.hidden/b.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "folder.txt").mkdir()
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "link.txt").symlink_to(tmp_path / "a/b.txt")
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "nothing")
    monkeypatch.chdir(tmp_path)
    for name in (pattern, str(tmp_path / pattern)):
        assert expand(name) == sorted(filter(os.path.isfile, glob.glob(name, recursive=True)))
