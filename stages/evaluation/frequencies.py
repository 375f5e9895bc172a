"""How often each piece of the vocabulary occurs, and the scores of a model that knows nothing else.

V: entries of the model's vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from stages.directory.manifest import StageDirectory
from stages.examples.sampled_rows import sampled_rows, text_rows
from trainer.data.shards import ShardSet
from trainer.data.vocabulary import CONTINUATION, UNK

Counts = NDArray[np.int64]

#: Classes of pieces by frequency rank, counted from 0; the value is the first rank beyond the class.
_CLASSES = {"frequent": 100, "common": 1000, "rare": None}


def count_pieces(work: StageDirectory, shards: ShardSet, vocab_size: int) -> Counts:
    """Count the pieces in the `text_rows` of `shards`: (V,). Raises `UserError` on an id outside the vocabulary."""
    counts = np.zeros(vocab_size, np.int64)
    with work.progress("count words", len(sampled_rows(shards)), "sequences") as bar:
        for ids, is_text in text_rows(shards, vocab_size):
            counts += np.bincount(ids[is_text], minlength=vocab_size)
            bar.update(len(ids))
    return counts


def frequency_scores(counts: Counts, masked: Counts, right: Counts) -> dict[str, Any]:
    """The unigram baseline, and the model's accuracy by frequency.

    `counts`: pieces in the text; `masked`, `right`: masked tokens and the correct predictions among them, by original
    piece; each (V,). The baseline predicts every token with the smoothed probabilities (count + 1) / (tokens + V)
    (add-one, Laplace), so that an unseen piece has one too; its best guess is the most frequent piece. An accuracy over
    no tokens is None.
    """
    total = int(masked.sum())
    log_probabilities = np.log((counts + 1) / (counts.sum() + len(counts)))
    by_rank = np.argsort(-counts, kind="stable")  # a tie goes to the smaller id
    found: dict[str, Any] = {
        "unigram_loss": -float(masked @ log_probabilities) / total,
        "unigram_accuracy": int(masked[by_rank[0]]) / total,
        "unigram_tokens": int(counts.sum()),
    }
    start = 0
    for name, end in _CLASSES.items():
        pieces = by_rank[start:end]
        tokens = int(masked[pieces].sum())
        found[f"masked_tokens_{name}"] = tokens
        found[f"masked_lm_accuracy_{name}"] = int(right[pieces].sum()) / tokens if tokens else None
        start = end or start
    return found


def characters(pieces: list[str], masked: Counts) -> int | None:
    """The characters of the masked tokens, without the prefix "##"; None if the vocabulary lacks one of the tokens.

    [UNK] counts as one character, and no word is shorter: bits per character are then an upper limit.
    """
    if masked[len(pieces) :].any():
        return None
    lengths = [1 if piece == UNK else len(piece.removeprefix(CONTINUATION)) for piece in pieces]
    return int(masked[: len(pieces)] @ np.array(lengths, np.int64))
