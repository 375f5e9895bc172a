"""MediaWiki dumps: every page is accounted for, the XML may be cut, packed and hostile, and the output is prose."""

from __future__ import annotations

import bz2
import gzip
import json
import re
import tracemalloc
from collections import Counter
from pathlib import Path
from xml.sax.saxutils import escape

import pytest

from common.errors import UserError
from common.hashing import InputHashes
from common.zstd import zstd
from stages.directory.manifest import StageDirectory
from stages.text.base import text_of
from stages.text.corpus import TokenizeOptions, open_sources, raw_documents
from stages.text.wikipedia import WikiPage
from stages.tokens import parts
from stages.tokens.encode import tokenize_corpus
from tests.conftest import Stage
from tests.helpers.support import assert_one_line_error
from tests.stages.text.test_wikitext import by_the_parser_alone

HEAD = (
    '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/"><siteinfo><namespaces><namespace key="0" />'
    '<namespace key="6">Datei</namespace><namespace key="1">Talk</namespace></namespaces></siteinfo>'
)
PROSE = "The town lies on both banks of the river and has been a market since the ninth century. " * 4

#: Suffixes of the files that must be the same.
KEPT = (".hdf5", ".txt")


def page(title: str, text: str, *, ns: str = "<ns>0</ns>", extra: str = "", model: str = "wikitext") -> str:
    return (
        f"<page><title>{escape(title)}</title>{ns}<id>1</id>{extra}<revision><id>2</id><comment>a [[b]]</comment>"
        f'<model>{model}</model><text bytes="9" xml:space="preserve">{escape(text)}</text></revision></page>'
    )


def write(path: Path, *pages: str, end: str = "</mediawiki>") -> Path:
    path.write_text(HEAD + "\n".join(pages) + end)
    return path


def read(path: Path) -> tuple[dict[str, str], Counter[str]]:
    """Text by title, and the counts."""
    counts: Counter[str] = Counter()
    found = {}
    for document in raw_documents(open_sources([str(path)], InputHashes()), counts):
        assert isinstance(document, WikiPage)
        if text := text_of(document, counts):
            found[document.title] = text
    return found, counts


def refused(path: Path) -> str:
    with pytest.raises(UserError) as error:
        read(path)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture(scope="session")
def dump(shared: Path) -> Path:
    return next((shared / "data/wikipedia").glob("*.bz2"))


@pytest.fixture(scope="session")
def articles(dump: Path) -> tuple[dict[str, str], Counter[str]]:
    return read(dump)


def test_every_page_of_a_real_dump_is_accounted_for(articles: tuple[dict[str, str], Counter[str]], dump: Path) -> None:
    found, counts = articles
    xml = bz2.decompress(dump.read_bytes()).decode()
    assert counts["read pages"] == xml.count("<page>") == 206
    assert counts["pages: redirects"] == xml.count("<redirect ") == 100
    left_out = sum(count for reason, count in counts.items() if reason.startswith("pages: "))
    assert len(found) + left_out == 206
    assert counts["pages: too short"] < 15  # disambiguations and a list


def test_no_markup_is_left_of_a_real_dump(articles: tuple[dict[str, str], Counter[str]]) -> None:
    residue = re.compile(
        r"\[\[|\]\]|\{\{|\}\}|\{\||\|\}|\|-|\||</|<ref|<br|''|&[a-z]+;|&#|thumb\||https?:|__[A-Z]+__|style=|colspan"
        r"|\(\s*[;,)]|[,;]\s*\)|  |^[*#:;=]|Category:|File:|\x02|\x03|\x04"
    )
    for title, text in articles[0].items():
        for line in text.split("\n"):
            assert not (match := residue.search(line)), (title, line[max(match.start() - 40, 0) : match.end() + 40])


def test_simple_markup_of_a_real_dump_is_what_the_parser_takes_it_for(
    articles: tuple[dict[str, str], Counter[str]], dump: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_the_parser_alone(monkeypatch)
    assert read(dump) == articles


def share_of_common_words(text: str) -> float:
    """0.174 in WikiText-2, which other people extracted from Wikipedia; less where markup is left."""
    words = re.findall(r"[a-z]+", text.lower())
    return sum(word in ("the", "of", "and", "in") for word in words) / len(words)


def test_what_is_left_of_a_real_dump_reads_as_prose(
    articles: tuple[dict[str, str], Counter[str]], shared: Path
) -> None:
    wikitext = shared / "data" / "wikitext-2" / "valid.txt"
    lines = [line for text in articles[0].values() for line in text.split("\n")]
    text = " ".join(lines)
    assert len(text) > 2_300_000  # 40 % of the wikitext
    assert sum(character.isalpha() or character == " " for character in text) > 0.93 * len(text)
    assert all(re.search(r"[.!?…][\"'”’»)\]]*$", line) for line in lines)
    assert share_of_common_words(text) == pytest.approx(share_of_common_words(wikitext.read_text()), rel=0.2)
    openings = {
        "Anarchism": "Anarchism is a political philosophy that advocates self-governed societies based on voluntary "
        "institutions. These are often described as stateless societies, although several authors",
        "Abraham Lincoln": "Abraham Lincoln (February 12, 1809 – April 15, 1865) was the 16th President of the United "
        "States, serving from March 1861 until his assassination in April 1865.",
        "Andorra": "Andorra, officially the Principality of Andorra, also called the Principality of the Valleys of "
        "Andorra, is a sovereign landlocked microstate in Southwestern Europe, located in the eastern Pyrenees",
        "Alabama": "Alabama is a state located in the southeastern region of the United States.",
    }
    for title, opening in openings.items():
        assert articles[0][title].startswith(opening)


def test_what_is_no_article_is_dropped_and_counted(tmp_path: Path) -> None:
    path = write(
        tmp_path / "d.xml",
        page("Town", PROSE + "[[Datei:Map.png|thumb|A [[map]].]]"),
        page("Old", "#REDIRECT [[Town]]", extra='<redirect title="Town" />'),
        page("Older", "#redirect [[Town]]"),
        page("Talk:Town", PROSE, ns="<ns>1</ns>"),
        page("Talk:Before 2011", PROSE, ns=""),
        page("2001: A Space Odyssey", PROSE, ns=""),
        page("Style", PROSE, model="css"),
        page("Nothing", ""),
        page("Stub", "A town."),
        page("Endless", PROSE * 7000),
    )
    found, counts = read(path)
    assert found == {"Town": PROSE.strip(), "2001: A Space Odyssey": PROSE.strip()}
    assert {key: n for key, n in counts.items() if "pages" in key} == {
        "read pages": 10, "pages: redirects": 2, "pages: other namespaces": 2, "pages: not in wikitext": 1,
        "pages: empty": 1, "pages: too short": 1, "pages: too long": 1,
    }  # fmt: skip


def test_packed_or_not_a_dump_is_the_same(tmp_path: Path) -> None:
    plain = write(tmp_path / "d.xml", *(page(f"Town {n}", PROSE + str(n) + ".") for n in range(50)))
    data = plain.read_bytes()
    streams = b"".join(bz2.compress(data[start : start + 9000]) for start in range(0, len(data), 9000))
    for name, content in (
        ("m.xml-p1p50.bz2", streams),
        ("e.xml.bz2", bz2.compress(data)),
        ("g.xml.gz", gzip.compress(data)),
        ("z.xml-p1p50.zst", zstd.compress(data)),
    ):
        (tmp_path / name).write_bytes(content)
        assert read(tmp_path / name) == read(plain)
    assert len(read(plain)[0]) == 50


@pytest.mark.parametrize("end", [0.3, 0.6, 0.99])
@pytest.mark.parametrize("kind", ["xml", "xml.bz2", "xml.gz"])
def test_a_cut_dump_says_what_was_read_and_fails(tmp_path: Path, dump: Path, kind: str, end: float) -> None:
    packed = dump.read_bytes()
    xml = bz2.decompress(packed)
    data = {"xml": xml, "xml.bz2": packed, "xml.gz": gzip.compress(xml, 1)}[kind]
    path = tmp_path / f"d.{kind}"
    path.write_bytes(data[: int(len(data) * end)])
    message = refused(path)
    assert str(path) in message
    assert "cut" in message
    if end > 0.5:
        pages = re.search(r"(\d+) pages were read, (\d+) of them articles, the last of them '", message)
        assert pages is not None, message
        assert 50 < int(pages[1]) < 206
        assert 0 < int(pages[2]) < int(pages[1])


@pytest.mark.parametrize("end", ["", "<page><title>C</title><ns>0</ns>", "<page><title>C & D"])
def test_xml_that_ends_or_breaks_between_pages_is_cut_too(tmp_path: Path, end: str) -> None:
    write(tmp_path / "a.xml", page("Z", PROSE))
    write(tmp_path / "d.xml", page("A", PROSE), page("B", PROSE), end=end)
    counts: Counter[str] = Counter()
    titles: list[str] = []
    documents = raw_documents(open_sources([str(tmp_path / "*.xml")], InputHashes()), counts)
    with pytest.raises(UserError, match=r"d\.xml is cut .* 2 pages were read, 2 of them articles, the last .* 'B'"):
        titles.extend(getattr(document, "title", "") for document in documents)
    assert titles == ["Z", "A", "B"]
    assert counts["read pages"] == 3


def test_what_is_no_dump_is_refused_in_one_line(tmp_path: Path) -> None:
    entities = "".join(f'<!ENTITY a{n} "{f"&a{n - 1};" * 10 if n else "lol" * 10}">' for n in range(12))
    bomb = f'<?xml version="1.0"?><!DOCTYPE m [{entities}]><mediawiki><page><title>&a11;</title></page></mediawiki>'
    cases = {
        "bomb.xml": (bomb.encode(), "has a document type declaration"),
        "page.xml": (b"<html><body/></html>", "is not a MediaWiki dump: it begins with <html>"),
        "text.xml": (b"plain text", "is not a MediaWiki dump (syntax error"),
        "empty.xml": (b"", "is not a MediaWiki dump (no element found"),
        "text.xml.bz2": (b"plain text", "is damaged or cut"),
        "latin.xml": (
            HEAD.encode() + page("A", PROSE).encode() + b"<page><title>caf\xe9 noir</title>",
            "not well-formed (invalid token)",
        ),
        "redirects.xml": (
            (HEAD + page("A", "#REDIRECT [[B]]") + "</mediawiki>").encode(),
            "holds no text: nothing was left (pages: redirects 1, read pages 1)",
        ),
    }
    for name, (content, message) in cases.items():
        (tmp_path / name).write_bytes(content)
        assert message in refused(tmp_path / name)


@pytest.mark.slow
def test_memory_does_not_grow_with_a_dump(tmp_path: Path) -> None:
    def peak(pages: int) -> int:
        path = write(tmp_path / f"{pages}.xml", *(page(f"Town {n}", PROSE * 10) for n in range(pages)))
        (tmp_path / "d.xml.bz2").write_bytes(bz2.compress(path.read_bytes(), 1))
        tracemalloc.start()
        assert (
            sum(1 for _ in raw_documents(open_sources([str(tmp_path / "d.xml.bz2")], InputHashes()), Counter()))
            == pages
        )
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    assert peak(6_000) < peak(600) + 1_000_000  # 24 MB of XML, and 2.4


@pytest.mark.slow
def test_neither_processes_nor_a_restart_show_in_the_bytes(
    tmp_path: Path, dump: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "_PART_CHARACTERS", 1_000_000)
    monkeypatch.setattr(parts, "_BATCH_CHARACTERS", 200_000)
    options = TokenizeOptions(sources=(str(dump),), vocab_size=3000)

    def run(name: str, processes: int) -> dict[str, bytes]:
        with StageDirectory.begin(tmp_path / name, options.identity) as work:
            tokenize_corpus(work, options, processes=processes)
        return {path.name: path.read_bytes() for path in sorted((tmp_path / name).rglob("*")) if path.suffix in KEPT}

    one = run("one", 1)
    assert sum(name.startswith("tokens_training") for name in one) > 3
    counts = json.loads((tmp_path / "one/manifest.json").read_text())["counts"]
    assert counts["read"] == {"pages": 206}
    pages = {reason: n for reason, n in counts["dropped"].items() if reason.startswith("pages: ")}
    assert counts["documents"] + counts["held_out_documents"] + sum(pages.values()) == 206
    assert run("two", 2) == one
    for name in ("manifest.json", "tokens_training_00001.hdf5", "tokens_test_00000.hdf5"):
        (tmp_path / "two" / name).unlink()
    assert run("two", 1) == one
    assert json.loads((tmp_path / "two/manifest.json").read_text())["counts"] == counts


def test_the_command_refuses_a_cut_dump_and_keeps_what_is_done(tmp_path: Path, stage: Stage) -> None:
    path = write(tmp_path / "d.xml", *(page(f"Town {n}", PROSE) for n in range(60)), end="")
    ran = stage("tokenize", "--source", path, "--vocab-size", 200, "--out", tmp_path / "o", "--processes", 1)
    assert_one_line_error(ran, "is cut or damaged", "60 pages were read")
    assert not (tmp_path / "o/manifest.json").exists()


def test_a_dump_of_stubs_is_refused(tmp_path: Path, stage: Stage) -> None:
    path = write(tmp_path / "d.xml", *(page(f"Town {n}", "A town.") for n in range(60)))
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\ntown")
    arguments = ("--source", path, "--vocab-file", vocabulary, "--out", tmp_path / "o", "--processes", 1)
    ran = stage("tokenize", *arguments)
    assert_one_line_error(ran, "no document of the corpus has any text in it (pages: too short 60")


def test_a_page_that_breaks_the_parser_is_named_and_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> str:
        raise IndexError("list index out of range")

    monkeypatch.setattr("stages.text.wikitext.prose", broken)
    counts: Counter[str] = Counter()
    assert WikiPage("Odd page", PROSE, ()).text(counts) == ""
    assert counts == {"pages: not to be parsed": 1}
    assert "note: the page 'Odd page' cannot be parsed and is left out (IndexError" in capsys.readouterr().err
