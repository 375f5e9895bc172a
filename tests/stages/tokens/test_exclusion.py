"""`stages.tokenize --exclude`: documents that another corpus holds out are not trained on."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.helpers.chain import write_corpus
from tests.helpers.support import assert_one_line_error, forked
from trainer.data.hdf5 import open_hdf5


def tokenized(source: Path, out: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return forked("stages.tokenize", "--source", source, "--processes", 1, *words, "--out", out)


def test_excluded_documents_are_left_out_whatever_their_white_space_and_case(tmp_path: Path) -> None:
    """The same text, changed only in ways that the tokenizer does not see, gives the first corpus' training tokens."""
    write_corpus(tmp_path / "a.txt", documents=12)
    first, again = tmp_path / "first", tmp_path / "again"
    done = tokenized(tmp_path / "a.txt", first, "--held-out", 0.25, "--vocab-size", 300)
    assert done.returncode == 0, done.stderr
    (tmp_path / "b.txt").write_text((tmp_path / "a.txt").read_text().upper().replace(" ", "   "))
    vocabulary = ("--vocab-file", first / "tokenizer" / "vocab.txt")
    done = tokenized(tmp_path / "b.txt", again, *vocabulary, "--held-out", 0, "--exclude", first)
    assert done.returncode == 0, done.stderr
    manifest = json.loads((again / "manifest.json").read_text())
    assert manifest["counts"]["dropped"] == {"documents: held out": 3}
    assert manifest["counts"]["documents"] == 9
    assert "excluded" in manifest["inputs"]
    part = "tokens_training_00000.hdf5"
    with open_hdf5(first / part) as one, open_hdf5(again / part) as two:
        assert all((one[key][()] == two[key][()]).all() for key in one)


def test_what_cannot_be_excluded_is_told(tmp_path: Path) -> None:
    """A folder without tokens; and a text of which nothing would be left."""
    write_corpus(tmp_path / "a.txt", documents=4)
    write_corpus(tmp_path / "b.txt", documents=4, seed=1)
    done = tokenized(tmp_path / "a.txt", tmp_path / "out", "--exclude", tmp_path)
    assert_one_line_error(done, "has no tokens_test_*.hdf5; give a directory of stages.tokenize")
    first = tmp_path / "first"
    done = tokenized(tmp_path / "b.txt", first, "--held-out-source", tmp_path / "a.txt", "--vocab-size", 300)
    assert done.returncode == 0, done.stderr
    vocabulary = ("--vocab-file", first / "tokenizer" / "vocab.txt")
    done = tokenized(tmp_path / "a.txt", tmp_path / "out", *vocabulary, "--held-out", 0, "--exclude", first)
    assert_one_line_error(done, "no document of the corpus has any text in it (documents: held out 4)")


def test_another_vocabulary_is_refused_as_its_ids_exclude_nothing(tmp_path: Path) -> None:
    """None given, so that a new one would be learned; and another one than that of the excluded tokens."""
    write_corpus(tmp_path / "a.txt", documents=12)
    first = tmp_path / "first"
    done = tokenized(tmp_path / "a.txt", first, "--held-out", 0.25, "--vocab-size", 300)
    assert done.returncode == 0, done.stderr
    theirs, other = first / "tokenizer" / "vocab.txt", tmp_path / "vocab.txt"
    other.write_text(theirs.read_text() + "more\n")
    for words, seen in (((), "no --vocab-file is given"), (("--vocab-file", other), f"{other} is another vocabulary")):
        done = tokenized(tmp_path / "a.txt", tmp_path / "out", *words, "--held-out", 0, "--exclude", first)
        assert_one_line_error(done, f"--exclude {first} compares token ids, and {seen}; give --vocab-file {theirs}")
        assert not list((tmp_path / "out").glob("*.hdf5"))
