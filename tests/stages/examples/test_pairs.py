"""Making examples: their distribution is that of Google's script, checked against a plain port of it."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest

from stages.examples.form import Form
from stages.examples.pairs import PAIR, Vocabulary, complete_rows, gather_rows, plan_pairs

Array = np.ndarray[Any, Any]
VOCAB = Vocabulary(1000, 2, 3, 4, np.arange(5, 1000), np.arange(1000) % 3 == 2)


def corpus(seed: int = 0, documents: int = 60) -> tuple[Array, Array, Array]:
    """tokens, sentence lengths and document lengths, with a few very long sentences."""
    rng = np.random.default_rng(seed)
    document_lengths = rng.integers(1, 40, documents)
    sentence_lengths = np.where(
        rng.random(document_lengths.sum()) < 0.02, 150, rng.integers(2, 45, document_lengths.sum())
    )
    return rng.integers(5, 1000, sentence_lengths.sum()).astype(np.uint16), sentence_lengths, document_lengths


def reference_pairs(documents: list[list[list[int]]], form: Form, draw: random.Random) -> list[tuple[Any, ...]]:
    """`create_instances_from_document` over all documents, sentence by sentence, token by token: (A, B, is random)."""
    pairs = []
    longest = form.seq_len - 3
    for _ in range(form.dupe_factor):
        for number, document in enumerate(documents):
            target = draw.randint(2, longest) if draw.random() < form.short_seq_prob else longest
            chunk: list[list[int]] = []
            i = 0
            while i < len(document):
                chunk.append(document[i])
                if i == len(document) - 1 or sum(map(len, chunk)) >= target:
                    split = draw.randint(1, len(chunk) - 1) if len(chunk) > 1 else 1
                    a = [token for sentence in chunk[:split] for token in sentence]
                    is_random = len(chunk) == 1 or draw.random() < 0.5
                    b: list[int] = []
                    if is_random:
                        other = draw.choice([j for j in range(len(documents)) if j != number])
                        for sentence in documents[other][draw.randint(0, len(documents[other]) - 1) :]:
                            b += sentence
                            if len(b) >= target - len(a):
                                break
                        i -= len(chunk) - split
                    else:
                        b = [token for sentence in chunk[split:] for token in sentence]
                    while len(a) + len(b) > longest:
                        longer = a if len(a) > len(b) else b
                        longer.pop(0 if draw.random() < 0.5 else -1)
                    pairs.append((a, b, is_random))
                    chunk = []
                i += 1
    return pairs


@pytest.mark.parametrize("seq_len", [64, 256])
def test_pairs_are_distributed_as_by_the_plain_algorithm(seq_len: int) -> None:
    tokens, sentence_lengths, document_lengths = corpus()
    form = Form(seq_len, 20)
    cut = np.cumsum(sentence_lengths)[:-1]
    sentences = [part.tolist() for part in np.split(tokens, cut)]
    ends = np.cumsum(document_lengths)
    documents = [sentences[end - length : end] for end, length in zip(ends, document_lengths, strict=True)]

    def facts(a: Array, b: Array, is_random: Array) -> list[float]:
        shorter = a + b < seq_len - 3
        return [len(a), a.mean(), b.mean(), is_random.mean(), shorter.mean(), a.std(), b.std(), (a == b).mean()]

    ours, theirs = [], []
    for seed in range(30):
        pairs = plan_pairs(sentence_lengths, document_lengths, form, rng=np.random.default_rng(seed))
        ours.append(facts(pairs["a_length"].astype(int), pairs["b_length"].astype(int), pairs["random"]))
        plain = reference_pairs(documents, form, random.Random(seed))
        theirs.append(facts(*(np.array(x) for x in zip(*((len(a), len(b), r) for a, b, r in plain), strict=True))))
    difference = np.mean(ours, axis=0) - np.mean(theirs, axis=0)
    error = np.sqrt((np.var(ours, axis=0) + np.var(theirs, axis=0)) / 30)
    # 16 comparisons of means over 30 seeds: four standard errors are exceeded by chance once in a thousand.
    assert np.all(np.abs(difference) < 4 * error), (difference / error).tolist()


def test_pairs_are_what_they_claim_to_be() -> None:
    tokens, sentence_lengths, document_lengths = corpus()
    pairs = plan_pairs(sentence_lengths, document_lengths, Form(64, 20), rng=np.random.default_rng(0))
    owner = np.repeat(np.arange(len(document_lengths)), document_lengths).repeat(sentence_lengths)
    a, b = pairs["a_start"].astype(int), pairs["b_start"].astype(int)
    a_end, b_end = a + pairs["a_length"], b + pairs["b_length"]
    assert (pairs["a_length"] > 0).all()
    assert (pairs["b_length"] > 0).all()
    assert (pairs["a_length"].astype(int) + pairs["b_length"]).max() == 61
    np.testing.assert_array_equal(owner[a], owner[a_end - 1])
    np.testing.assert_array_equal(owner[b], owner[b_end - 1])
    np.testing.assert_array_equal(owner[a] != owner[b], pairs["random"])
    follows = ~pairs["random"]
    assert (b[follows] >= a_end[follows]).all()
    untouched = follows & (a_end - a + b_end - b < 61)
    np.testing.assert_array_equal(b[untouched], a_end[untouched])
    # Every document is used once per repetition, and the plan is shuffled.
    assert set(owner[a]) == set(range(len(document_lengths)))
    assert (np.diff(owner[a]) < 0).mean() > 0.4


@pytest.mark.parametrize("segment", ["a", "b"])
def test_segments_are_cut_at_either_end_by_chance(segment: str) -> None:
    """Of n tokens that a segment loses, k come off the front with the probability of k heads in n tosses."""
    lengths = np.full(4000, 100)  # two documents of long sentences: every pair is cut
    pairs = plan_pairs(lengths, np.array([2000, 2000]), Form(128, 20), rng=np.random.default_rng(0))
    start, length = pairs[f"{segment}_start"].astype(int) % 100, pairs[f"{segment}_length"].astype(int)
    lost = 100 - length
    whole = (lost > 0) & (lost < 100)  # what is left is part of one sentence
    front, lost = start[whole], lost[whole]
    assert len(lost) > 1000
    assert (front <= lost).all()
    # Heads minus half of the tosses: mean 0, variance a quarter of the tosses; within five standard errors each.
    error = (front - lost / 2) / np.sqrt(lost / 4)
    assert abs(error.mean()) < 5 / np.sqrt(len(error))
    assert abs((error**2).mean() - 1) < 5 * np.sqrt(2 / len(error))


def test_a_single_document_gives_only_pairs_that_follow_each_other() -> None:
    pairs = plan_pairs(np.full(50, 10), np.array([50]), Form(64, 20), rng=np.random.default_rng(0))
    assert len(pairs) > 0
    assert not pairs["random"].any()


def made(form: Form, seed: int = 0) -> tuple[Array, dict[str, Array], Array]:
    """Unmasked rows, the arrays, and the pairs."""
    tokens, sentence_lengths, document_lengths = corpus(documents=300)
    rng = np.random.default_rng(seed)
    pairs = plan_pairs(sentence_lengths, document_lengths, dataclasses.replace(form, dupe_factor=2), rng=rng)
    rows = gather_rows(tokens, pairs, VOCAB, form.seq_len)
    return rows.copy(), complete_rows(rows, pairs, form, VOCAB, rng=rng), pairs


def test_rows_are_cls_a_sep_b_sep_and_padding() -> None:
    tokens, _, _ = corpus(documents=300)
    rows, arrays, pairs = made(Form(64, 10))
    for row, mask, segment, pair in zip(rows, arrays["input_mask"], arrays["segment_ids"], pairs, strict=True):
        a = tokens[pair["a_start"] :][: pair["a_length"]].tolist()
        b = tokens[pair["b_start"] :][: pair["b_length"]].tolist()
        expected = [2, *a, 3, *b, 3]
        padding = [0] * (64 - len(expected))
        assert row.tolist() == expected + padding
        assert mask.tolist() == [1] * len(expected) + padding
        assert segment.tolist() == [0] * (len(a) + 2) + [1] * (len(b) + 1) + padding
    np.testing.assert_array_equal(arrays["next_sentence_labels"], pairs["random"])


@pytest.mark.parametrize("whole_word_mask", [False, True])
def test_masks_follow_the_rules_of_the_paper(whole_word_mask: bool) -> None:
    form = Form(128, 12, whole_word_mask=whole_word_mask)
    before, arrays, _ = made(form)
    after, positions, ids = arrays["input_ids"], arrays["masked_lm_positions"], arrays["masked_lm_ids"]
    lengths = arrays["input_mask"].sum(axis=1, dtype=int)
    predicted = (positions > 0).sum(axis=1)
    expected = [min(12, max(1, round(int(length) * 0.15))) for length in lengths]
    if whole_word_mask:
        assert (predicted <= expected).all()
        assert predicted.mean() > 0.97 * np.mean(expected)
    else:
        assert predicted.tolist() == expected
    for row in range(len(before)):
        chosen = positions[row, : predicted[row]].astype(int)
        assert (np.diff(chosen) > 0).all()
        np.testing.assert_array_equal(before[row, chosen], ids[row, : predicted[row]])
        assert not ids[row, predicted[row] :].any()
        assert not positions[row, predicted[row] :].any()
        unchosen = np.setdiff1d(np.arange(128), chosen)
        np.testing.assert_array_equal(after[row, unchosen], before[row, unchosen])
    masked_rows, _ = np.nonzero(positions)
    was, now = ids[positions > 0], after[masked_rows, positions[positions > 0]]
    assert was.min() >= 5
    assert now[now != 4].min() >= 5
    shares = [(now == 4).mean(), ((now == was) & (now != 4)).mean(), ((now != was) & (now != 4)).mean()]
    # Five standard deviations of a share among this many masks; a random id equals the old one in 1 of 995.
    np.testing.assert_allclose(shares, [0.8, 0.1, 0.1], atol=5 * 0.4 / np.sqrt(len(was)) + 1e-3)


@pytest.mark.parametrize("whole_word_mask", [False, True])
def test_every_place_is_masked_as_often_as_any_other(whole_word_mask: bool) -> None:
    """Also with whole-word masking, where each piece is a word of its own."""
    form = Form(32, 5, whole_word_mask=whole_word_mask)
    vocabulary = dataclasses.replace(VOCAB, continues=np.zeros(1000, bool))
    tokens = np.arange(5, 1000).astype(np.uint16)
    pairs = np.zeros(20_000, PAIR)
    pairs["a_length"], pairs["b_start"], pairs["b_length"] = 15, 100, 14
    rng = np.random.default_rng(1)
    arrays = complete_rows(gather_rows(tokens, pairs, vocabulary, 32), pairs, form, vocabulary, rng=rng)
    positions = arrays["masked_lm_positions"]
    seen = np.bincount(positions[positions > 0].astype(int), minlength=32)
    assert seen[[0, 16, 31]].tolist() == [0, 0, 0]
    places = np.delete(seen, [0, 16, 31])
    expected = places.sum() / 29
    assert np.abs(places - expected).max() < 4.5 * np.sqrt(expected)


def test_whole_words_are_masked_whole() -> None:
    before, arrays, pairs = made(Form(128, 20, whole_word_mask=True))
    checked = 0
    #: For pieces that continue a word and begin a segment: whether they are masked (and the one before the [SEP]).
    first_of_a, first_of_b = [], []
    for row, positions, pair in zip(before, arrays["masked_lm_positions"], pairs, strict=True):
        chosen = set(positions[positions > 0].tolist())
        if VOCAB.continues[row[1]]:
            first_of_a.append(1 in chosen)
        begin = int(pair["a_length"]) + 2
        if VOCAB.continues[row[begin]]:
            first_of_b.append((begin in chosen, begin - 2 in chosen))
        special = {0, int(pair["a_length"]) + 1, int(pair["a_length"]) + int(pair["b_length"]) + 2}
        for place in range(1, max(special)):
            if place in special or place - 1 in special or not VOCAB.continues[row[place]]:
                continue
            assert (place in chosen) == (place - 1 in chosen)
            checked += 1
    assert checked > 1000
    # A segment begins with a word of its own: 15 % of these are masked, whatever is masked before the [SEP].
    assert len(first_of_a) > 100
    assert 0.05 < np.mean(first_of_a) < 0.25
    of_b, before_sep = np.array(first_of_b).T
    assert len(of_b) > 100
    assert (of_b & ~before_sep).any()
    assert (~of_b & before_sep).any()
