"""Rows of whole sentences, for training without next-sentence prediction: every token once, in its place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stages.examples.form import DOC_SENTENCES, FULL_SENTENCES, Form
from stages.examples.sentences import plan_sentences
from stages.tokens.files import SPLITS, TEST, TRAINING, part_paths, read_part
from tests.conftest import Stage
from tests.helpers.corpora import make_tokens
from tests.helpers.support import assert_one_line_error
from trainer.data.shards import LENGTHS_KEY, MASKED_KEYS, NEXT_SENTENCE_KEY, ShardSet
from trainer.data.validation import validate_file
from trainer.data.vocabulary import Vocabulary, read_vocabulary

S = 32
FORM = ("--seq-len", S, "--max-pred-len", 5, "--shards", 3, "--no-next-sentence")
Sequences = Counter[tuple[int, ...]]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokens(tmp_path_factory.mktemp("corpus") / "tokens", documents=120)


@pytest.fixture(scope="module")
def vocabulary(tokens: Path) -> Vocabulary:
    return Vocabulary.of(read_vocabulary(tokens / "tokenizer" / "vocab.txt"))


def documents(tokens: Path, split: str) -> Iterator[list[list[list[int]]]]:
    """For each part: its documents, their sentences, their tokens."""
    for path in part_paths(tokens, split):
        part = read_part(path)
        ids = iter(part["tokens"].tolist())
        sentences = iter([[next(ids) for _ in range(length)] for length in part["sentence_lengths"]])
        yield [[next(sentences) for _ in range(length)] for length in part["document_lengths"]]


def plain(tokens: Path, split: str, vocabulary: Vocabulary, *, crosses: bool) -> Sequences:
    """The sequences of a split as the paper describes them, a sentence at a time; one longer than a row in pieces."""
    found: Sequences = Counter()
    for part in documents(tokens, split):
        rows: list[list[int]] = [[]]
        for document in part:
            pieces = [sentence[at : at + S - 2] for sentence in document for at in range(0, len(sentence), S - 2)]
            for number, piece in enumerate(pieces):
                is_next_document = number == 0 and bool(rows[-1])
                longer = [*rows[-1], *([vocabulary.sep] if is_next_document else []), *piece]
                if len(longer) > S - 2 or (is_next_document and not crosses):
                    rows.append(piece)
                else:
                    rows[-1] = longer
        found.update((vocabulary.cls, *row, vocabulary.sep) for row in rows)
    return found


def made(stage: Stage, tokens: Path, out: Path, *words: object) -> None:
    done = stage("shard", "--tokens", tokens, "--out", out, *FORM, *words)
    assert done.returncode == 0, done.stderr


def sequences(directory: Path, split: str) -> tuple[Sequences, list[dict[str, Any]]]:
    """The sequences in the shards of a split, with masks undone; and the arrays."""
    shards = ShardSet.open(directory, f"*_{split}_*.hdf5")
    found: Sequences = Counter()
    every = []
    for shard, rows in enumerate(shards.rows_per_shard):
        arrays = shards.read(shard, np.arange(rows))
        every.append(arrays)
        ids = arrays["input_ids"].astype(np.int64)
        if MASKED_KEYS[0] in arrays:
            row, entry = np.nonzero(arrays[MASKED_KEYS[0]])
            ids[row, arrays[MASKED_KEYS[0]][row, entry]] = arrays[MASKED_KEYS[1]][row, entry]
        lengths = arrays.get(LENGTHS_KEY, arrays["input_mask"].sum(1, keepdims=True, dtype=np.int64))
        for one, cut in zip(ids.tolist(), np.cumsum(lengths, axis=1).tolist(), strict=True):
            found.update(tuple(one[a:b]) for a, b in zip([0, *cut], cut, strict=False) if b > a)
    return found, every


@pytest.mark.parametrize("masking", ["dynamic", "static"])
@pytest.mark.parametrize("pack", [False, True])
def test_rows_are_those_of_the_plain_algorithm(
    tmp_path: Path, stage: Stage, tokens: Path, vocabulary: Vocabulary, masking: str, pack: bool
) -> None:
    words = ["--masking", masking, "--dupe-factor", 1, *(["--pack"] if pack else [])]
    made(stage, tokens, tmp_path, *words)
    for split in SPLITS:
        found, arrays = sequences(tmp_path, split)
        assert found == plain(tokens, split, vocabulary, crosses=not pack)
        for one in arrays:
            assert NEXT_SENTENCE_KEY not in one
            assert (MASKED_KEYS[0] in one) == (masking == "static" or split == TEST)
            assert (LENGTHS_KEY in one) == (pack and split == TRAINING)
            assert not one["segment_ids"].any()
            np.testing.assert_array_equal(one["input_mask"] > 0, one["input_ids"] > 0)
    for path in tmp_path.glob("*.hdf5"):
        validate_file(path, seq_len=S, vocab_size=vocabulary.size)


def test_all_tokens_are_there_once_and_in_order_whatever_the_lengths(tmp_path: Path) -> None:
    """With made-up parts, also with sentences longer than rows, which are cut so that they fill rows."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        document_lengths = rng.integers(1, 9, rng.integers(1, 30))
        sentence_lengths = rng.integers(1, rng.choice([5, 20, 120]), document_lengths.sum())
        document = np.repeat(np.repeat(np.arange(len(document_lengths)), document_lengths), sentence_lengths)
        place = np.arange(sentence_lengths.sum()) + document  # of each token, with a separator after each document
        for kind in (FULL_SENTENCES, DOC_SENTENCES):
            form = Form(S, 5, kind, dupe_factor=2)
            found = plan_sentences(sentence_lengths, document_lengths, form, rng=rng)
            assert not found["b_length"].any()
            assert 1 <= found["a_length"].min() <= found["a_length"].max() <= S - 2
            found = np.sort(found, order="a_start")
            np.testing.assert_array_equal(found[::2], found[1::2])  # each twice
            ranges = [np.arange(a, a + n) for a, n in zip(found["a_start"][::2], found["a_length"][::2], strict=True)]
            covered = np.concatenate(ranges)
            is_text = np.isin(covered, place)
            np.testing.assert_array_equal(covered[is_text], place)
            assert all(one[0] in place and one[-1] in place for one in ranges)
            if kind == DOC_SENTENCES:
                assert is_text.all()
            else:  # no row has room for what follows: the next sentence, or its first piece
                ends = np.concatenate([[0], np.cumsum(sentence_lengths)])
                for one, after in zip(ranges, ranges[1:], strict=False):
                    token = int(np.searchsorted(place, after[0]))
                    left = ends[np.searchsorted(ends, token, "right")] - token
                    assert after[0] + min(left, S - 2) - one[0] > S - 2


def test_static_masks_are_never_on_separators_and_whole_words_stay_whole(
    tmp_path: Path, stage: Stage, tokens: Path, vocabulary: Vocabulary
) -> None:
    made(stage, tokens, tmp_path, "--dupe-factor", 4, "--whole-word-mask")
    found, arrays = sequences(tmp_path, TRAINING)
    expected = plain(tokens, TRAINING, vocabulary, crosses=True)
    assert found == Counter({row: 4 * times for row, times in expected.items()})
    assert sum(vocabulary.sep in row[1:-1] for row in expected) > 10
    draws = set()
    for one in arrays:
        for row, (positions, labels) in enumerate(zip(one[MASKED_KEYS[0]], one[MASKED_KEYS[1]], strict=True)):
            chosen, ids = positions[positions > 0].tolist(), one["input_ids"][row].tolist()
            for at, label in zip(chosen, labels, strict=False):
                ids[at] = int(label)
            assert not {ids[at] for at in chosen} & {vocabulary.cls, vocabulary.sep, 0}
            for at in chosen:
                if vocabulary.continues[ids[at]] and at > 1:  # a row may begin within a long sentence
                    assert at - 1 in chosen
                if at + 1 < S and vocabulary.continues[ids[at + 1]]:
                    assert at + 1 in chosen
            draws.add((tuple(ids), tuple(chosen)))
    assert len(draws) > 3 * len(expected)  # the copies have different masks


@pytest.mark.parametrize("form", [(), ("--next-sentence",)], ids=["sentences", "pairs"])
def test_held_out_rows_are_the_same_however_training_is_masked(
    tmp_path: Path, stage: Stage, tokens: Path, form: tuple[str, ...]
) -> None:
    """Else evaluations could not be compared."""
    held_out = []
    for name, words in (
        ("plain", ()),
        ("masked", ("--masked-lm-prob", 0.3, "--whole-word-mask", "--dupe-factor", 3)),
        ("dynamic", ("--masking", "dynamic", "--dupe-factor", 1)),
    ):
        made(stage, tokens, tmp_path / name, *form, *words)
        held_out.append({path.name: path.read_bytes() for path in (tmp_path / name).glob("*_test_*")})
    assert held_out[0]
    assert held_out[0] == held_out[1] == held_out[2]


def test_shards_do_not_depend_on_processes_and_do_on_the_seed(tmp_path: Path, stage: Stage, tokens: Path) -> None:
    def shards(name: str, *words: object) -> dict[str, bytes]:
        made(stage, tokens, tmp_path / name, *words)
        return {path.name: path.read_bytes() for path in sorted((tmp_path / name).glob("*.hdf5"))}

    one = shards("one", "--processes", 1)
    assert shards("two", "--processes", 2) == one
    other = shards("other", "--processes", 1, "--seed", 5)
    assert all(other[name] != content for name, content in one.items())


def test_one_document_is_enough(tmp_path: Path, stage: Stage) -> None:
    tokens = make_tokens(tmp_path / "tokens", documents=1, held_out=0)
    made(stage, tokens, tmp_path / "out", "--shards", 1)
    done = stage("shard", "--tokens", tokens, "--out", tmp_path / "pairs", *FORM[:-1])
    assert_one_line_error(done, "1 training document;", "without next-sentence prediction")


def test_copies_that_would_be_the_same_are_refused(tmp_path: Path, stage: Stage, tokens: Path) -> None:
    done = stage("shard", "--tokens", tokens, "--out", tmp_path, *FORM, "--masking", "dynamic")
    assert_one_line_error(done, "--dupe-factor 5", "identical copies of each row", "allowed: 1, or static masks")


def test_the_rows_of_a_shard_come_from_all_of_the_text(tmp_path: Path, stage: Stage, tokens: Path) -> None:
    """Each shard has a random share of every part of the corpus: its rows are spread evenly over each part."""
    made(stage, tokens, tmp_path, "--masking", "dynamic", "--dupe-factor", 1)
    parts = [" ".join(map(str, read_part(path)["tokens"].tolist())) for path in part_paths(tokens, TRAINING)]
    assert len(parts) > 3
    shards = ShardSet.open(tmp_path)
    for shard, rows in enumerate(shards.rows_per_shard):
        ids = shards.read(shard, np.arange(rows))["input_ids"]
        begins = [" ".join(map(str, row[1:8])) for row in ids.tolist()]
        places = np.array([part.find(one) / len(part) for part in parts for one in begins if one in part])
        # Uniform in 0 … 1: the mean is within 5 standard errors. The first third of each part would be off by 1/3.
        assert len(places) > 100
        assert abs(places.mean() - 1 / 2) < 5 / (12 * len(places)) ** 0.5
