"""Our shards compared with those that NVIDIA's own script made from the same text and vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from stages.examples.form import Form
from stages.examples.pairs import Vocabulary, complete_rows, gather_rows, plan_pairs
from stages.tokens.wordpiece import Encoder
from tests.conftest import Stage
from trainer.data.shards import KEYS, ShardSet
from trainer.data.validation import validate_file
from trainer.data.vocabulary import CONTINUATION, SPECIAL_TOKENS, read_vocabulary

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]
PAD, UNK, CLS, SEP, MASK = range(5)
FORMS = {128: Form(128, 20), 512: Form(512, 80)}


@pytest.fixture(scope="module")
def fixture(shared: Path) -> Path:
    return shared / "fixtures/nvidia_hdf5"


def published_reader(path: Path) -> Arrays:
    """Like `pretraining_dataset` in NVIDIA's and AWS's scripts: whole datasets, each item cast to int64."""
    with h5py.File(path, "r") as file:
        return {key: np.asarray(file[key][:]).astype(np.int64) for key in KEYS}


def published_labels(arrays: Arrays, row: int, max_pred_len: int) -> Array:
    """An item's `masked_lm_labels` as the same class makes them: the token to predict, or -100 elsewhere."""
    labels = np.full(arrays["input_ids"].shape[1], -100)
    end = max_pred_len
    padded = np.flatnonzero(arrays["masked_lm_positions"][row] == 0)
    if len(padded):
        end = padded[0]
    labels[arrays["masked_lm_positions"][row][:end]] = arrays["masked_lm_ids"][row][:end]
    return labels


def check_rows(arrays: Arrays, form: Form) -> None:
    """Pairs are well formed; as many tokens are predicted as there should be, and none of them is special."""
    ids, mask, segments = (arrays[key].astype(int) for key in ("input_ids", "input_mask", "segment_ids"))
    positions, labels = arrays["masked_lm_positions"].astype(int), arrays["masked_lm_ids"].astype(int)
    whole = ids.copy()  # as it was before masking
    row, _ = np.nonzero(positions)
    whole[row, positions[positions > 0]] = labels[positions > 0]
    lengths = mask.sum(axis=1)
    column = np.arange(form.seq_len)
    np.testing.assert_array_equal(mask, column < lengths[:, None])
    assert not whole[mask == 0].any()
    assert (whole[:, 0] == CLS).all()
    assert ((whole == CLS).sum(axis=1) == 1).all()
    # exactly two [SEP]: the last token, and the last of segment 0
    assert ((whole == SEP).sum(axis=1) == 2).all()
    first = (lengths - segments.sum(axis=1))[:, None]  # where segment 1 begins
    np.testing.assert_array_equal(whole == SEP, (column == first - 1) | (column == lengths[:, None] - 1))
    np.testing.assert_array_equal(segments, (column >= first) & (column < lengths[:, None]))
    assert (first[:, 0] >= 3).all()  # A is not empty
    assert (lengths - first[:, 0] >= 2).all()  # nor is B
    predicted = (positions > 0).sum(axis=1)
    expected = [min(form.max_pred_len, max(1, round(int(length) * form.masked_lm_prob))) for length in lengths]
    assert predicted.tolist() == expected
    used = np.arange(form.max_pred_len) < predicted[:, None]
    assert not positions[~used].any()
    assert not labels[~used].any()
    assert (np.diff(positions, axis=1)[used[:, 1:]] > 0).all()
    assert not np.isin(labels[used], [PAD, CLS, SEP, MASK]).any()
    assert set(np.unique(arrays["next_sentence_labels"])) == {0, 1}


def unaffected(arrays: Arrays, longest: bytes) -> Arrays:
    """The rows longer than half, of documents other than the longest.

    One document has a fifth of the text's tokens, and whether it is among the 10 % with a short target (2 … S tokens)
    decides how many short rows there are: with a target of some twenty tokens it makes 700, as happened in theirs for
    S=512. So it says nothing about how lengths are distributed.
    """
    long = arrays["input_mask"].sum(axis=1, dtype=int) > arrays["input_ids"].shape[1] // 2
    kept = []
    for row in np.flatnonzero(long):
        ids, positions = arrays["input_ids"][row].astype("<u2"), arrays["masked_lm_positions"][row]
        ids[positions[positions > 0]] = arrays["masked_lm_ids"][row][positions > 0]
        if ids[1 : np.flatnonzero(ids == SEP)[0]].tobytes() not in longest:
            kept.append(row)
    return {key: values[kept] for key, values in arrays.items()}


def statistics(arrays: Arrays, long: Arrays) -> dict[str, float]:
    """Statistics of masks in all rows, and of pairs and lengths in the `unaffected` ones."""
    lengths = arrays["input_mask"].sum(axis=1, dtype=int)
    positions = arrays["masked_lm_positions"].astype(int)
    row, _ = np.nonzero(positions)
    now, was = arrays["input_ids"][row, positions[positions > 0]], arrays["masked_lm_ids"][positions > 0]
    long_lengths = long["input_mask"].sum(axis=1, dtype=int)
    b_length = long["segment_ids"].sum(axis=1, dtype=int) - 1
    random = long["next_sentence_labels"].astype(bool)
    return {
        "masked share": len(row) / lengths.sum(),
        "became [MASK]": (now == MASK).mean(),
        "stayed": ((now == was) & (now != MASK)).mean(),
        "became another": ((now != was) & (now != MASK)).mean(),
        "mean place of a mask": (positions[positions > 0] / lengths[row]).mean(),
        "rows": len(long_lengths),
        "random next": random.mean(),
        "mean length": long_lengths.mean(),
        "deviation of lengths": long_lengths.std(),
        "full rows": (long_lengths == long["input_ids"].shape[1]).mean(),
        "mean of B": b_length.mean(),
        "mean of B if random": b_length[random].mean(),
    }


def lengths_apart(one: Array, other: Array) -> float:
    """The Kolmogorov-Smirnov distance of two samples of lengths."""
    places = np.union1d(one, other)
    shares = [np.searchsorted(np.sort(sample), places, "right") / len(sample) for sample in (one, other)]
    return float(np.abs(shares[0] - shares[1]).max())


class Text:
    """Text with one sentence per line and a blank line between documents, as their script reads it, as ids."""

    def __init__(self, path: Path, vocabulary: Path) -> None:
        pieces = read_vocabulary(vocabulary)
        assert tuple(pieces[:5]) == SPECIAL_TOKENS
        documents = [[line for line in part.split("\n") if line.strip()] for part in path.read_text().split("\n\n")]
        documents = [document for document in documents if document]
        ids, self.sentences = Encoder(pieces, lower_case=True).encode([line for lines in documents for line in lines])
        self.ids = ids.astype("<u2")
        self.documents = np.array([len(document) for document in documents])
        continues = np.array([piece.startswith(CONTINUATION) for piece in pieces])
        self.vocabulary = Vocabulary(len(pieces), CLS, SEP, MASK, np.arange(5, len(pieces)), continues)
        ends = np.cumsum(self.sentences)[np.cumsum(self.documents) - 1]
        self.longest = max((part.tobytes() for part in np.split(self.ids, ends[:-1])), key=len)

    def make(self, form: Form, seed: int) -> Arrays:
        rng = np.random.default_rng(seed)
        pairs = plan_pairs(self.sentences, self.documents, form, rng=rng)
        rows = gather_rows(self.ids, pairs, self.vocabulary, form.seq_len)
        return complete_rows(rows, pairs, form, self.vocabulary, rng=rng)


@pytest.mark.parametrize("split", ["training", "test"])
@pytest.mark.parametrize("seq_len", [128, 512])
def test_ours_are_statistically_theirs(fixture: Path, seq_len: int, split: str) -> None:
    theirs = published_reader(fixture / f"seq{seq_len}/stdlib_{split}_0.hdf5")
    check_rows(theirs, FORMS[seq_len])
    text = Text(fixture / f"text/stdlib_{split}_0.txt", fixture / "vocab.txt")
    runs = [text.make(FORMS[seq_len], seed) for seed in range(40)]
    for ours in runs:
        check_rows(ours, FORMS[seq_len])
    kept, kept_of_runs = unaffected(theirs, text.longest), [unaffected(ours, text.longest) for ours in runs]
    made = [statistics(*both) for both in zip(runs, kept_of_runs, strict=True)]
    apart = {}
    for name, seen in statistics(theirs, kept).items():
        values = [run[name] for run in made]
        apart[name] = (seen - np.mean(values)) / np.std(values)
    # One run of theirs against forty of ours, in twelve numbers: four deviations occur by chance once in a thousand.
    assert all(abs(deviation) < 4 for deviation in apart.values()), apart
    # Their lengths are no farther from all of ours together than a single run of ours can be.
    lengths = [run["input_mask"].sum(axis=1, dtype=int) for run in kept_of_runs]
    together = np.concatenate(lengths)
    distances = [lengths_apart(one, together) for one in lengths]
    assert lengths_apart(kept["input_mask"].sum(axis=1), together) < np.mean(distances) + 4 * np.std(distances)


def test_ours_load_in_the_published_readers_and_theirs_here(fixture: Path, tmp_path: Path, stage: Stage) -> None:
    text, vocabulary = fixture / "text/stdlib_training_0.txt", fixture / "vocab.txt"
    ran = stage("tokenize", "--source", text, "--vocab-file", vocabulary, "--out", tmp_path / "tokens")
    assert ran.returncode == 0, ran.stderr
    words = ("--seq-len", 128, "--max-pred-len", 20, "--shards", 2, "--out", tmp_path / "shards")
    ran = stage("shard", "--tokens", tmp_path / "tokens", *words)
    assert ran.returncode == 0, ran.stderr
    ours = ShardSet.open(tmp_path / "shards", seq_len=128, max_pred_len=20)
    theirs = ShardSet.open(fixture / "seq128", seq_len=128, max_pred_len=20)
    for path in (*sorted((tmp_path / "shards").glob("*.hdf5")), fixture / "seq128/stdlib_training_0.hdf5"):
        as_published = published_reader(path)
        check_rows(as_published, FORMS[128])
        assert validate_file(path, seq_len=128, max_pred_len=20, vocab_size=8192) == len(as_published["input_ids"])
        for row in range(0, len(as_published["input_ids"]), 97):
            labels, positions = published_labels(as_published, row, 20), as_published["masked_lm_positions"][row]
            assert np.flatnonzero(labels >= 0).tolist() == positions[positions > 0].tolist()
    # Both readers see the same in both kinds of files.
    for shards, name in ((ours, "bert_training_00001.hdf5"), (theirs, "stdlib_training_0.hdf5")):
        as_published = published_reader(shards.directory / name)
        here = shards.read(shards.names.index(name), np.arange(len(as_published["input_ids"])))
        for key in KEYS:
            np.testing.assert_array_equal(here[key], as_published[key])
