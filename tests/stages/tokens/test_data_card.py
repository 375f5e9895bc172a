"""The data card: the Hub can read it, its figures are those of the tokens, and it is the same whenever it is made."""

from __future__ import annotations

import calendar
import hashlib
import json
import os
import re
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest

from stages.directory.manifest import StageDirectory, why_incomplete
from stages.text import builtin
from stages.text.corpus import TokenizeOptions
from stages.tokens import data_card, parts
from stages.tokens.encode import tokenize_corpus
from tests.conftest import Stage
from tests.stages.text.test_wikipedia import PROSE, page
from tests.stages.text.test_wikipedia import write as write_dump
from tests.stages.tokens.test_tokenize import write_corpus

CHANGED = calendar.timegm((2025, 2, 28, 23, 59, 59))


def tokens(out: Path, *sources: object, processes: int = 1, **options: Any) -> Path:
    asked = TokenizeOptions(sources=tuple(map(str, sources)), **{"vocab_size": 300, **options})
    with StageDirectory.begin(out, asked.identity) as work:
        tokenize_corpus(work, asked, processes=processes)
    return out


def card(directory: Path) -> str:
    return (directory / "DATACARD.md").read_text()


def rows(text: str) -> dict[str, list[str]]:
    """The cells of each row of each table, by the row's first cell."""
    lines = [re.split(r" *(?<!\\)\| *", line)[1:-1] for line in text.split("\n") if line.startswith("| ")]
    return {first: others for first, *others in lines}


def manifest(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "manifest.json").read_text())
    return found


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = write_corpus(tmp_path / "text | of mine.txt", documents=400)
    with path.open("a") as file:
        file.write("\n\n\x01\x02\n")
    os.utime(path, (CHANGED, CHANGED))
    return path


def test_the_hub_reads_its_header(tmp_path: Path, corpus: Path) -> None:
    read = huggingface_hub.DatasetCard.load(tokens(tmp_path / "out", corpus) / "DATACARD.md")
    assert read.data.size_categories == ["n<1K"]
    assert read.data.task_categories == ["fill-mask"]
    assert read.data.language is None  # nothing states it
    assert {"bert", "pretraining"} == set(read.data.tags)


@pytest.mark.parametrize(
    ("documents", "category"),
    [(999, "n<1K"), (1000, "1K<n<10K"), (6_500_000, "1M<n<10M"), (10**9, "1B<n<10B"), (10**14, "n>1T")],
)
def test_sizes_are_the_hubs_categories(documents: int, category: str) -> None:
    assert f"\n- {category}\n" in data_card._metadata([], documents)


def test_its_figures_are_those_of_the_documents(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths by Hugging Face's tokenizer; quantiles by numpy."""
    from transformers import BertTokenizerFast  # type: ignore[attr-defined, unused-ignore]

    monkeypatch.setattr(parts, "_PART_CHARACTERS", 40_000)
    held_out = write_corpus(tmp_path / "held-out.txt", documents=30, seed=1)
    out = tokens(tmp_path / "out", corpus, held_out_sources=(str(held_out),))
    found, counts = rows(card(out)), manifest(out)["counts"]
    assert len(list(out.glob("tokens_training_*"))) > 2
    tokenizer = BertTokenizerFast.from_pretrained(out / "tokenizer")
    lengths = []
    for path in (corpus, held_out):
        texts = [text for text in path.read_text().split("\n\n") if text.strip() and "\x01" not in text]
        lengths.append([len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]])
    for name, q in (("shortest", 0), ("5%", 0.05), ("25%", 0.25), ("median", 0.5), ("99%", 0.99), ("longest", 1)):
        expected = [int(np.quantile(of_split, q, method="inverted_cdf")) for of_split in lengths]
        assert found[name] == [f"{length:,}" for length in expected], name
    assert found["documents"] == ["400", "30"] == [str(len(of_split)) for of_split in lengths]
    assert found["tokens"] == [f"{sum(of_split):,}" for of_split in lengths]
    assert sum(int(cell.replace(",", "")) for cell in found["sentences"]) == counts["sentences"]
    assert found["documents held out"] == ["6.98%, from files of their own"]
    assert found["lines: control characters only"] == ["1"]
    assert found["pieces"] == [str(len(tokenizer))]
    assert found["tokenizers"] == [metadata.version("tokenizers")]
    for path, name in ((corpus, "text \\| of mine.txt"), (held_out, "held-out.txt")):
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        assert found[name] == ["text", f"{path.stat().st_size:,}", f"`{sha256}`"]
    assert str(tmp_path) not in card(out)


def test_it_is_the_same_whenever_and_wherever_it_is_made(tmp_path: Path, corpus: Path, stage: Stage) -> None:
    one = tokens(tmp_path / "one", corpus)
    (tmp_path / "elsewhere").mkdir()
    copy = tmp_path / "elsewhere" / corpus.name
    copy.write_bytes(corpus.read_bytes())
    os.utime(copy, (CHANGED, CHANGED))
    assert card(tokens(tmp_path / "two", copy, processes=2)) == card(one)
    words = ("--source", corpus, "--vocab-size", 300, "--processes", 1, "--out", tmp_path / "killed")
    assert stage("tokenize", *words, FAILPOINT="rename-before:manifest.json").returncode == -9
    assert card(tmp_path / "killed") == card(one)
    (tmp_path / "killed/DATACARD.md").write_text("Half of")
    assert stage("tokenize", *words).returncode == 0
    assert card(tmp_path / "killed") == card(one)
    assert rows(card(one))["newest file changed (UTC)"] == ["2025-02-28"]


def test_it_is_an_output_whose_edit_is_noticed(tmp_path: Path, corpus: Path) -> None:
    out = tokens(tmp_path / "out", corpus)
    (output,) = (output for output in manifest(out)["outputs"] if output["path"] == "DATACARD.md")
    assert output["sha256"] == hashlib.sha256((out / "DATACARD.md").read_bytes()).hexdigest()
    assert why_incomplete(out, manifest(out)["fingerprint"], verify=True) is None
    (out / "DATACARD.md").write_text(card(out) + "and more")
    assert "DATACARD.md has" in str(why_incomplete(out, manifest(out)["fingerprint"]))


def test_a_dump_says_its_language_and_what_was_read(tmp_path: Path) -> None:
    dump = write_dump(tmp_path / "d.xml", *(page(f"Town {n}", PROSE + str(n) + ".") for n in range(50)))
    text = dump.read_text()
    assert text.count("<mediawiki ") == 1
    dump.write_text(re.sub(r'<mediawiki ([^>]*?)(?:xml:lang="\w+")?>', r'<mediawiki \1 xml:lang="no">', text))
    out = tokens(tmp_path / "out", dump)
    assert rows(card(out))["language"] == ["no"]
    assert rows(card(out))["pages"] == ["50"]
    assert rows(card(out))["wikitextparser"] == [metadata.version("wikitextparser")]
    # Not a boolean, which it would be in YAML.
    assert huggingface_hub.DatasetCard.load(out / "DATACARD.md").data.language == ["no"]


def test_the_builtin_text_is_english_and_has_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"Document {number}, built in." for number in range(50)]
    monkeypatch.setattr(builtin, "builtin_documents", lambda: (texts, Counter({"modules: no new text": 7})))
    found = rows(card(tokens(tmp_path / "out", "builtin")))
    assert f"numpy {metadata.version('numpy').partition('+')[0]}" in found["builtin"][2]
    assert found["language"] == ["en"]
    assert found["modules: no new text"] == ["7"]
    assert "newest file changed (UTC)" not in found


def test_many_files_are_counted_and_the_first_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_card, "_LISTED", 3)
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text("One.\n\nTwo.")
    text = card(tokens(tmp_path / "out", tmp_path / "*.txt", document="file", held_out=0))
    assert [name for name in rows(text) if re.fullmatch(r"\d.txt", name)] == ["0.txt", "1.txt", "2.txt"]
    assert "… and 2 more files" in text
    assert rows(text)["files"] == ["5"]
    assert rows(text)["median"][1] == "–"  # nothing is held out
    assert rows(text)["a document of plain text ends"] == ["with its file"]


def test_a_name_that_is_no_utf_8_is_escaped(tmp_path: Path) -> None:
    source = tmp_path / os.fsdecode(b"caf\xe9.txt")
    write_corpus(source, documents=20)
    assert r"| caf\udce9.txt |" in card(tokens(tmp_path / "out", source))
