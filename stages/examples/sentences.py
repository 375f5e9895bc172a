"""Whole consecutive sentences → sequences without a second segment, for training without next-sentence prediction.

FULL-SENTENCES and DOC-SENTENCES of Liu et al. 2019 (RoBERTa), arXiv:1907.11692, section 4.2: a sequence takes whole
sentences as long as they fit. The former continue into the next document, after an extra [SEP], so that every row but a
part's last is as full as sentences allow, which suits fixed-size batches. The latter end with their document and are
packed: they share rows without attending to each other. A sentence longer than a sequence is cut into several.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from stages.examples.form import FULL_SENTENCES, SPECIAL_POSITIONS_ALONE, Form
from stages.examples.pairs import PAIR
from stages.tokens.files import read_part
from trainer.data.hdf5 import Array


def separated(part: Path, separator: int) -> Array:
    """The ids of a part with `separator` after each document: (tokens + documents,)."""
    arrays = read_part(part)
    cut = np.concatenate([[0], np.cumsum(arrays["sentence_lengths"], dtype=np.int64)])
    ends = cut[np.cumsum(arrays["document_lengths"], dtype=np.int64)]
    return np.insert(arrays["tokens"], ends, separator)


def plan_sentences(sentence_lengths: Array, document_lengths: Array, form: Form, *, rng: np.random.Generator) -> Array:
    """Cut a part into sequences of sentences, each `dupe_factor` times; returns (sequences,) `PAIR`, shuffled.

    They are ranges of the part's `separated` ids; every token is in one of them, and no sequence begins or ends with a
    separator.
    """
    longest = form.seq_len - SPECIAL_POSITIONS_ALONE
    pieces = -(-sentence_lengths // longest)  # of each sentence
    sentence = np.repeat(np.arange(len(sentence_lengths)), pieces)
    number = np.arange(len(sentence)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    document = np.repeat(np.arange(len(document_lengths)), document_lengths)[sentence]
    start = (np.cumsum(sentence_lengths) - sentence_lengths)[sentence] + document + number * longest
    end = start + np.minimum(sentence_lengths[sentence] - number * longest, longest)
    #: For each piece: the first one that a sequence beginning with it has no room for.
    following = np.searchsorted(end, start + longest, "right")
    if form.sequences != FULL_SENTENCES:
        following = np.minimum(following, np.searchsorted(document, document, "right"))
    chain, piece, after = [], 0, following.tolist()
    while piece < len(after):
        chain.append(piece)
        piece = after[piece]
    first = np.array(chain, np.int64)
    found = np.zeros(len(first), PAIR)
    found["a_start"] = start[first]
    found["a_length"] = end[following[first] - 1] - start[first]
    found = np.tile(found, form.dupe_factor)
    return found[rng.permutation(len(found))]
