"""How often each piece of the vocabulary occurs, and the scores of a model that knows nothing else.

V: entries of the model's vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from stages.directory.manifest import StageDirectory
from trainer.data.order import Samples
from trainer.data.reader import BatchReader
from trainer.data.shards import MASKED_KEYS, ShardSet
from trainer.data.vocabulary import CONTINUATION, UNK

Counts = NDArray[np.int64]

#: Limits on what is counted: files, as other tools' are decoded whole, and rows in all of them together.
_SHARDS_MAX, _ROWS_MAX = 16, 1 << 16
_ROWS_AT_ONCE = 4096
#: The classes of pieces by their rank in frequency, from 0: the first rank beyond each class.
_CLASSES = {"frequent": 100, "common": 1000, "rare": None}


def evenly_spaced(count: int, most: int) -> list[int]:
    """At most `most` of the numbers 0 … count - 1, as evenly spaced as whole numbers can be."""
    chosen = min(count, most)
    return [index * count // chosen for index in range(chosen)]


def counted_shards(names: list[str]) -> list[str]:
    """The files, of all of a data set's in the order of their names, whose pieces are counted."""
    return [names[index] for index in evenly_spaced(len(names), _SHARDS_MAX)]


def count_pieces(work: StageDirectory, shards: ShardSet, vocab_size: int) -> Counts:
    """Count the pieces in the text of evenly spaced rows of `shards`: (V,), the same for the same data.

    Masked tokens count as what they were. [CLS] and [SEP], which are never masked, are left out: without a vocabulary
    they are known as a row's first and last token. Raises `UserError` on an id outside the vocabulary.
    """
    reader, counts = BatchReader(shards, vocab_size=vocab_size), np.zeros(vocab_size, np.int64)
    samples = _sampled(shards)
    with work.progress("count words", len(samples), "sequences") as bar:
        for start in range(0, len(samples), _ROWS_AT_ONCE):
            arrays = reader.read(samples[np.s_[start : start + _ROWS_AT_ONCE]])
            ids, is_text = arrays["input_ids"].astype(np.int64), arrays["input_mask"].astype(bool)
            if MASKED_KEYS[0] in arrays:
                positions, labels = (arrays[key].astype(np.int64) for key in MASKED_KEYS)
                row, entry = np.nonzero(positions)
                ids[row, positions[row, entry]] = labels[row, entry]
            counts += np.bincount(ids[is_text], minlength=vocab_size)
            counts[[ids[0, 0], ids[0, np.count_nonzero(is_text[0]) - 1]]] = 0
            bar.update(len(ids))
    return counts


def _sampled(shards: ShardSet) -> Samples:
    chosen = evenly_spaced(len(shards.names), _SHARDS_MAX)
    rows = [np.array(evenly_spaced(int(shards.rows_per_shard[one]), _ROWS_MAX // len(chosen))) for one in chosen]
    return Samples(np.repeat(chosen, [len(one) for one in rows]), np.concatenate(rows).astype(np.int64))


def frequency_scores(counts: Counts, masked: Counts, right: Counts) -> dict[str, Any]:
    """The unigram baseline, and the model's accuracy by frequency.

    `counts`: of the text, `masked` and `right`: masked tokens, and correct predictions among them, by what they were;
    each (V,). The baseline predicts every token with the smoothed probabilities (count + 1) / (tokens + V) (add-one,
    Laplace), so that a piece that was never seen has one too; its best guess is the most frequent piece. An accuracy
    over no tokens is None.
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

    [UNK] counts as one, which no word is shorter than: bits per character are then an upper limit.
    """
    if masked[len(pieces) :].any():
        return None
    lengths = [1 if piece == UNK else len(piece.removeprefix(CONTINUATION)) for piece in pieces]
    return int(masked[: len(pieces)] @ np.array(lengths, np.int64))
