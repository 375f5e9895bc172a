"""The tokens of a text do not depend on the format that it comes in."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from common.zstd import zstd
from stages.directory.manifest import StageDirectory
from stages.text.corpus import TokenizeOptions
from stages.tokens import parts
from stages.tokens.encode import tokenize_corpus
from tests.conftest import Stage
from tests.helpers.chain import WORDS, Chain
from tests.helpers.corpora import WAYS, table_of, write_table
from tests.helpers.support import assert_one_line_error


def texts(count: int) -> list[str]:
    draw = random.Random(0)
    return [
        "\n".join(
            " ".join(draw.choices(WORDS.split(), k=draw.randint(3, 20))).capitalize() + "."
            for _ in range(draw.randint(1, 12))
        )
        for _ in range(count)
    ]


def json_lines(path: Path, documents: list[str]) -> Path:
    path.write_text("".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(documents)))
    return path


def made(directory: Path) -> dict[str, bytes]:
    files = [*directory.glob("*.hdf5"), *directory.glob("tokenizer/*")]
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def test_the_same_documents_are_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_PART_CHARACTERS", 40_000)
    documents = texts(300)

    def tokens(source: Path) -> dict[str, bytes]:
        out = tmp_path / f"{source.name} tokens"
        options = TokenizeOptions(sources=(str(source),), vocab_size=300)
        with StageDirectory.begin(out, options.identity) as work:
            tokenize_corpus(work, options, processes=1)
        return made(out)

    lines = json_lines(tmp_path / "a.jsonl", documents)
    expected = tokens(lines)
    assert sum(name.startswith("tokens_training") for name in expected) > 2
    packed = tmp_path / "a.jsonl.zst"
    packed.write_bytes(zstd.compress(lines.read_bytes()))
    assert tokens(packed) == expected
    for way in WAYS:
        assert tokens(write_table(tmp_path / way, table_of(documents))) == expected


def test_a_killed_run_goes_on_and_ends_with_the_same_bytes(tmp_path: Path, stage: Stage) -> None:
    documents = texts(100)
    lines = json_lines(tmp_path / "a.jsonl", documents)
    write_table(tmp_path / "plain.parquet", table_of(documents))
    arguments = ("--vocab-size", 300, "--processes", 2, "--out")
    assert stage("tokenize", "--source", lines, *arguments, tmp_path / "lines").returncode == 0
    rows = ("--source", tmp_path / "*.parquet", *arguments, tmp_path / "rows")
    assert stage("tokenize", *rows, FAILPOINT="write-after:tokens_training_00000.hdf5").returncode == -9
    again = stage("tokenize", *rows)
    assert again.returncode == 0, again.stderr
    assert made(tmp_path / "rows") == made(tmp_path / "lines")
    assert "complete already" in stage("tokenize", *rows).stderr


def test_luigi_takes_a_folder_of_tables(tmp_path: Path) -> None:
    chain, documents = Chain(tmp_path), texts(60)
    (tmp_path / "data").mkdir()
    write_table(tmp_path / "data/zstd.parquet", table_of(documents[:30]))
    write_table(tmp_path / "data/stream.arrow", table_of(documents[30:]))
    lines = json_lines(tmp_path / "a.jsonl", [*documents[30:], *documents[:30]])  # a glob is sorted by name
    chain.run("TokenizeCorpus", "--Corpus-source", str(lines))
    expected = made(chain.latest("tokenize_corpus"))
    chain.run("TokenizeCorpus", "--Corpus-source", str(tmp_path / "data/*"))
    tokens = chain.latest("tokenize_corpus")
    assert made(tokens) == expected
    assert "| stream.arrow | arrow |" in (tokens / "DATACARD.md").read_text()
    (tmp_path / "data/zstd.parquet").rename(tmp_path / "data/zstd.parquet.gz")
    packed = chain.run("TokenizeCorpus", "--Corpus-source", str(tmp_path / "data/*"), status=35)
    assert_one_line_error(packed, "zstd.parquet.gz: Parquet is compressed inside", status=35)
