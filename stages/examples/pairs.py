"""Token ids → BERT examples, vectorised: segment pairs, rows and masks.

The distribution is that of Google's create_pretraining_data.py (google-research/bert), which NVIDIA's script follows,
except that a random second segment comes from the same part of the corpus, not from all of it. All randomness comes
from the generators passed in, so the same seeds give the same bytes on any machine.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stages.examples.form import SPECIAL_POSITIONS, SPECIAL_POSITIONS_ALONE, Form
from trainer.data.hdf5 import Array
from trainer.data.masking import choose_tokens, choose_words, replaced
from trainer.data.vocabulary import Vocabulary

#: One example: its two segments as token ranges of a part, and whether the second is random. One without a second
#: segment (`stages.examples.sentences`) is [CLS] A [SEP].
PAIR = np.dtype(
    [("a_start", np.uint32), ("b_start", np.uint32), ("a_length", np.uint16), ("b_length", np.uint16), ("random", "?")]
)
#: Rows masked at a time, so that their random keys and copies fit into the CPU cache.
_MASKED_ROWS = 2048


def plan_pairs(sentence_lengths: Array, document_lengths: Array, form: Form, *, rng: np.random.Generator) -> Array:
    """Cut all documents of a part into segment pairs, `dupe_factor` times; returns (pairs,) `PAIR`, shuffled.

    As in `create_instances_from_document`: sentences are collected up to a target length and split at random into A
    and B; half of the time B comes from another document instead and the unused sentences go into the next pair.
    A part with a single document gives only consecutive pairs.
    """
    cut = np.concatenate([[0], np.cumsum(sentence_lengths, dtype=np.int64)])
    ends = np.cumsum(document_lengths, dtype=np.int64)
    number = len(ends)
    if not number:
        return np.empty(0, PAIR)
    # One lane per document and repetition; each iteration cuts the next pair of every lane.
    document = np.tile(np.arange(number), form.dupe_factor)
    at, stop = (ends - document_lengths)[document], ends[document]
    longest = form.seq_len - SPECIAL_POSITIONS
    target = np.full(len(document), longest)
    short = rng.random(len(document)) < form.short_seq_prob
    target[short] = rng.integers(2, longest, int(short.sum()), endpoint=True)

    found = []
    while len(document):
        draw = rng.random((5, len(document)))
        end = np.minimum(np.searchsorted(cut, cut[at] + target), stop)
        split = at + 1 + (draw[0] * np.maximum(end - at - 1, 1)).astype(np.int64)
        alone = end - at == 1
        random = alone | (draw[1] < 0.5)
        other = _other(document, number, draw[2])
        start = ends[other] - 1 - (draw[3] * document_lengths[other]).astype(np.int64)
        missing = target - (cut[split] - cut[at])
        reach = np.clip(np.searchsorted(cut, cut[start] + missing), start + 1, ends[other])
        b, b_end = np.where(random, start, split), np.where(random, reach, end)
        whole = ~random | (other != document)
        found.append(_truncate(cut[at], cut[split], cut[b], cut[b_end], random, longest, rng)[whole])
        at = np.where(random, split, end)
        more = at < stop
        document, at, stop, target = document[more], at[more], stop[more], target[more]
    pairs = np.concatenate(found)
    return pairs[rng.permutation(len(pairs))]


def _other(document: NDArray[np.int64], number: int, draw: NDArray[np.float64]) -> NDArray[np.int64]:
    """For each document, a different one drawn uniformly; the document itself if it is the only one."""
    if number == 1:
        return document
    other = (draw * (number - 1)).astype(np.int64)
    return other + (other >= document)


def _truncate(
    a: Array, a_end: Array, b: Array, b_end: Array, random: Array, longest: int, rng: np.random.Generator
) -> Array:
    """Shorten pairs to `longest` tokens, removing one at a time from a random end of the longer segment.

    In closed form: the longer segment loses tokens until both are equal, then B and A alternate, B first.
    """
    a_length, b_length = a_end - a, b_end - b
    surplus = np.maximum(a_length + b_length - longest, 0)
    uneven = np.minimum(surplus, np.abs(a_length - b_length))
    from_a = np.where(a_length > b_length, uneven, 0) + (surplus - uneven) // 2
    from_b = surplus - from_a
    pairs = np.empty(len(a), PAIR)
    pairs["a_start"], pairs["a_length"] = a + rng.binomial(from_a, 0.5), a_length - from_a
    pairs["b_start"], pairs["b_length"] = b + rng.binomial(from_b, 0.5), b_length - from_b
    pairs["random"] = random
    return pairs


def lengths_of(pairs: Array) -> Array:
    """Tokens of each pair including special tokens, int64, same shape; 0 for an empty slot."""
    both = pairs["a_length"].astype(np.int64) + pairs["b_length"]
    special = np.where(pairs["b_length"] > 0, SPECIAL_POSITIONS, SPECIAL_POSITIONS_ALONE)
    return np.where(both > 0, both + special, 0)


def gather_rows(tokens: Array, pairs: Array, vocabulary: Vocabulary, seq_len: int) -> Array:
    """`[CLS] A [SEP] B [SEP]` or `[CLS] A [SEP]`, zero-padded, for each pair: (pairs, seq_len), dtype of `tokens`."""
    column = np.arange(seq_len, dtype=np.int32)
    a_length = pairs["a_length"].astype(np.int32)[:, None]
    end = lengths_of(pairs).astype(np.int32)[:, None] - 1
    # Indices of special tokens and padding may be out of range; clip them, since these positions are overwritten.
    a_shift = pairs["a_start"].astype(np.int64)[:, None] - 1
    b_shift = pairs["b_start"].astype(np.int64)[:, None] - a_length - 2
    rows: Array = tokens.take(column + np.where(column <= a_length, a_shift, b_shift), mode="clip")
    rows[:, 0] = vocabulary.cls
    every = np.arange(len(pairs))
    rows[every, a_length[:, 0] + 1] = vocabulary.sep
    rows[every, end[:, 0]] = vocabulary.sep
    rows *= column <= end
    return rows


def complete_rows(
    rows: Array, pairs: Array, form: Form, vocabulary: Vocabulary, *, rng: np.random.Generator
) -> dict[str, Array]:
    """Mask `rows` (N, S) from `gather_rows` in place, if the form says so; returns the arrays of an unpacked shard."""
    N, P = len(rows), form.max_pred_len
    arrays = {
        "input_ids": rows,
        "input_mask": np.empty(rows.shape, np.uint8),
        "segment_ids": np.empty(rows.shape, np.uint8),
    }
    if form.next_sentence:
        arrays["next_sentence_labels"] = pairs["random"].astype(np.uint8)
    if form.is_masked:
        arrays["masked_lm_positions"] = np.empty((N, P), np.uint16)
        arrays["masked_lm_ids"] = np.empty((N, P), rows.dtype)
    column = np.arange(form.seq_len, dtype=np.uint16)
    for start in range(0, N, _MASKED_ROWS):
        here = slice(start, start + _MASKED_ROWS)
        first = pairs["a_length"][here, None] + np.uint16(1)
        last = (lengths_of(pairs[here])[:, None] - 1).astype(np.uint16)
        arrays["input_mask"][here] = real = column <= last
        arrays["segment_ids"][here] = (column > first) & real
        if not form.is_masked:
            continue
        candidates = real & (rows[here] != vocabulary.sep)
        candidates[:, 0] = False
        positions, ids = _mask(rows[here], candidates, last[:, 0] + np.int64(1), form, vocabulary, rng)
        arrays["masked_lm_positions"][here], arrays["masked_lm_ids"][here] = positions, ids
    return arrays


def _mask(
    rows: Array, candidates: Array, lengths: Array, form: Form, vocabulary: Vocabulary, rng: np.random.Generator
) -> tuple[Array, Array]:
    """Mask `rows` in place; returns positions (ascending) and original ids, (N, P), zero-padded."""
    wanted, limit = form.masked_positions(lengths), form.max_pred_len
    if form.whole_word_mask:
        draws = rng.random(candidates.shape)
        positions = choose_words(draws, rows, candidates, wanted, limit, vocabulary.continues)
    else:
        low = int(candidates.shape[1] - 1).bit_length()
        bits = rng.integers(0, 1 << (32 - low), candidates.shape, np.uint32) << np.uint32(low)
        positions = choose_tokens(bits, candidates, wanted, limit, low=low)
    chosen = positions > 0  # position 0 is [CLS], which is never masked: it means none
    row, _ = np.nonzero(chosen)
    place = positions[chosen]
    before = rows[row, place]
    ids = np.zeros(positions.shape, rows.dtype)
    ids[chosen] = before
    fate = rng.random(len(place))
    replacement = vocabulary.ordinary[rng.integers(0, len(vocabulary.ordinary), len(place))]
    rows[row, place] = replaced(before, fate, replacement, vocabulary.mask)
    return positions, ids
