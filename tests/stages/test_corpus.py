"""Sources: what a document and a sentence are, and what is refused."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from pathlib import Path

import pytest

from stages.corpus import BUILTIN, documents, open_sources, raw_documents, sentences
from trainer.errors import UserError


def read(*specs: object) -> tuple[list[str], Counter[str]]:
    dropped: Counter[str] = Counter()
    return list(raw_documents(open_sources(map(str, specs)), dropped)), dropped


def test_blank_lines_part_documents_and_lines_part_sentences(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xef\xbb\xbf\n\nOne. Two!\r\nThree\r\n \t\r\n\n\nFour by Dr. Smith.\nFive")
    assert list(documents(str(path))) == [["One.", "Two!", "Three"], ["Four by Dr. Smith.", "Five"]]


def test_a_glob_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    for name in ("b.txt", "c.text", "a.txt"):
        (tmp_path / name).write_text(f"From {name}\n\nAgain {name}")
    found, _ = read(tmp_path / "*.txt")
    assert found == ["From a.txt", "Again a.txt", "From b.txt", "Again b.txt"]


def test_wikitext_loses_nothing_but_white_space(shared: Path) -> None:
    path = shared / "data/wikitext-2/valid.txt"
    found = list(documents(str(path)))
    assert len(found) == 60  # as its README says
    assert "".join("".join("".join(document).split()) for document in found) == "".join(path.read_text().split())
    assert sum(map(len, found)) > 5000


def test_one_sentence_a_line_is_cut_further_only_where_a_sentence_ends(shared: Path) -> None:
    path = shared / "fixtures/nvidia_hdf5/text/stdlib_training_0.txt"
    lines = [line.strip() for line in path.read_text().split("\n") if line.strip()]
    found = [sentence for document in documents(str(path)) for sentence in document]
    assert " ".join(found).split() == " ".join(lines).split()
    pieces = [sentence for line in lines for sentence in sentences(line)[:-1]]
    assert len(found) == len(lines) + len(pieces)
    assert len(pieces) < 0.2 * len(lines)
    assert sum(piece[-1] in ".!?" for piece in pieces) > 0.9 * len(pieces)


def test_builtin_text_is_prose_without_duplicates_and_always_the_same() -> None:
    found, dropped = read(BUILTIN)
    assert found == read(BUILTIN)[0]
    assert len(found) > 300
    assert sum(map(len, found)) > 1_000_000
    paragraphs = [line for document in found for line in document.split("\n")]
    assert len(paragraphs) == len(set(paragraphs))
    assert dropped["paragraphs: seen before"] > 0
    text = "\n".join(found)
    assert text.count(">>> ") < 20
    assert ":class:`" not in text


def test_long_lines_and_documents_are_cut_so_that_memory_stays_bounded(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    word = "wörd "
    path.write_text(word * 4_000_000)  # 24 MB without a line end
    tracemalloc.start()
    dropped: Counter[str] = Counter()
    lengths = [len(document) for document in raw_documents(open_sources([str(path)]), dropped)]
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
    def refused(*specs: object) -> str:
        with pytest.raises(UserError) as error:
            read(*specs)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "there is no source file" in refused(tmp_path / "none.txt")
    assert "no file matches the source" in refused(tmp_path / "*.txt")
    assert "is a folder" in refused(tmp_path)
    for name, content in (("empty", b""), ("controls", b"\x00\x01\x1b\n\x7f\n\n"), ("white", b" \n\t\n")):
        path = tmp_path / name
        path.write_bytes(content)
        assert f"{path} holds no text" in refused(path)
    path = tmp_path / "latin1.txt"
    path.write_bytes(b"plain line\n" * 200_000 + b"caf\xe9 noir\n")
    assert f"{path} is not UTF-8: byte 0xe9 at offset 2200003" in refused(path)
    assert f"source {path} is named 2 times" in refused(path, path)


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
