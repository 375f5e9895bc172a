"""Facts about the examples of a run that show whether a model can learn from them.

They are gathered on the host before batches move to a device. B: rows, S: tokens in a row, M: masked tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.data.bert_batch import BertBatch
from trainer.metrics.unigram import UnigramBaseline, collisions

Ids = NDArray[np.int64]

#: At least this many labels of a step are examined, if it has them: more would cost time and tell little.
_LABELS = 4096
#: Rows of an epoch that are remembered.
_ROWS_MAX = 1 << 16
#: Fewest labels, or rows, from which anything is concluded.
_LEAST = 200
#: Fewest steps from which batches are compared with each other.
_STEPS_LEAST = 10


@dataclass(frozen=True)
class BatchFacts:
    """What a step's examples look like."""

    #: (M,) the masked tokens, and the ids that the model sees in their places.
    labels: Ids
    seen: Ids
    #: Masked tokens in padding.
    in_padding: int
    #: Largest position id.
    last_position: int
    #: (B,) hashes of the rows.
    rows: NDArray[np.uint64]
    epoch: int


def examine(batches: Iterable[BertBatch], epoch: int, *, with_masks: bool) -> BatchFacts:
    """The facts about the first of a step's micro-batches. `with_masks`: rows with other masks count as other rows, for
    shards that hold each row several times, masked differently."""
    labels, seen, rows = [], [], []
    in_padding = last_position = found = 0
    for batch in batches:
        is_masked = batch.masked_labels.numpy() >= 0
        place, label = batch.masked_index.numpy()[is_masked], batch.masked_labels.numpy()[is_masked]
        ids = batch.input_ids.numpy()
        labels.append(label)
        seen.append(ids.reshape(-1)[place])
        in_padding += int(np.count_nonzero(batch.sequence_ids.numpy().reshape(-1)[place] == 0))
        last_position = max(last_position, int(batch.position_ids.max()))
        rows.append(_hashes(ids if with_masks else _unmasked(ids, place, label)))
        found += len(label)
        if found >= _LABELS:
            break
    return BatchFacts(
        np.concatenate(labels), np.concatenate(seen), in_padding, last_position, np.concatenate(rows), epoch
    )


def _unmasked(ids: Ids, masked: Ids, labels: Ids) -> Ids:
    whole = ids.copy()
    whole.reshape(-1)[masked] = labels
    return whole


def _hashes(ids: Ids) -> NDArray[np.uint64]:
    whole = ids.astype(np.uint64)
    odd = np.arange(1, 2 * ids.shape[1], 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (whole ^ (whole << np.uint64(17))) * (odd ^ (odd >> np.uint64(29)))
    sums: NDArray[np.uint64] = mixed.sum(axis=1, dtype=np.uint64)
    return sums


class DataFacts:
    """The facts about all steps so far, and what is wrong with them."""

    def __init__(self, vocab_size: int) -> None:
        self.unigram = UnigramBaseline(vocab_size)
        self._seen_at_masks = np.zeros(vocab_size, np.int64)
        #: For each id that the model sees in place of a masked token: how often it is the token itself.
        self._unchanged = np.zeros(vocab_size, np.int64)
        self._in_padding = self._last_position = 0
        self._collisions: list[float] = []
        self._epoch, self._rows_of_epoch = 0, set[int]()
        self._rows = self._repeated = 0

    def add(self, facts: BatchFacts) -> None:
        vocab_size = len(self._unchanged)
        self.unigram.add(facts.labels)
        self._seen_at_masks += np.bincount(facts.seen, minlength=vocab_size)
        self._unchanged += np.bincount(facts.seen[facts.seen == facts.labels], minlength=vocab_size)
        self._in_padding += facts.in_padding
        self._last_position = max(self._last_position, facts.last_position)
        self._collisions.append(collisions(np.bincount(facts.labels)))
        if facts.epoch != self._epoch:  # each epoch has the same rows
            self._epoch, self._rows_of_epoch = facts.epoch, set()
        if len(self._rows_of_epoch) < _ROWS_MAX:
            self._rows += len(facts.rows)
            fresh = set(facts.rows.tolist()) - self._rows_of_epoch
            self._repeated += len(facts.rows) - len(fresh)
            self._rows_of_epoch |= fresh

    def faults(self) -> list[tuple[str, str]]:
        """(cause, what was seen and what to do) of each fault; [] also while there is too little to tell."""
        if self.unigram.total < _LEAST:
            return []
        return [*self._of_masks(), *self._of_rows(), *self._of_vocabulary()]

    def _of_masks(self) -> Iterator[tuple[str, str]]:
        """BERT's masking replaces 80 % of the masked tokens by [MASK] and 10 % by any token; 10 % stay: of the ids seen
        there other than [MASK] (the most frequent one), half are the token itself."""
        total, mask = self.unigram.total, int(self._seen_at_masks.argmax())
        others = total - int(self._seen_at_masks[mask])
        unchanged = int(self._unchanged.sum() - self._unchanged[mask])
        shown, in_padding = int(self._unchanged.sum()) / total, self._in_padding / total
        if shown > 0.6:
            text = f"the input shows {shown:.0%} of the masked tokens (usual: 10 %); check that masks are applied"
            yield "labels visible", text
        elif others > _LEAST / 4 and others < 0.5 * total and unchanged < 0.2 * others:
            text = (
                f"where the input has no [MASK] (id {mask}), {unchanged / others:.0%} of the labels are the input's id"
            )
            yield "labels shuffled", f"{text} (usual: half); check that labels belong to their positions"
        if in_padding > 0.5:
            text = f"{in_padding:.0%} of the masked tokens are in padding, which nothing attends to"
            yield "attention mask", f"{text}; check that input_mask is 1 for tokens and 0 for padding"
        if self._last_position == 0:
            yield "positions", "all tokens have position 0, so the model knows no order; check the position ids"

    def _of_rows(self) -> Iterator[tuple[str, str]]:
        if self._rows >= _LEAST and self._repeated > 0.5 * self._rows:
            share = self._repeated / self._rows
            yield "duplicates", f"{share:.0%} of the rows of an epoch repeat another; check the corpus for duplicates"

    def _of_vocabulary(self) -> Iterator[tuple[str, str]]:
        ratio = float(np.mean(self._collisions)) / max(1e-12, self.unigram.collisions)
        most = self.unigram.most_frequent
        if len(self._collisions) >= _STEPS_LEAST and ratio > 3:
            text = f"two tokens of a batch are alike {ratio:.0f} times as often as two of different batches, as if ids"
            yield "vocabulary", f"{text} meant something else in each; check that one vocabulary made all shards"
        elif most > 0.3:
            text = f"id {int(self.unigram.counts.argmax())} is {most:.0%} of the masked tokens"
            yield "vocabulary", f"{text}; check that the vocabulary fits the text (is this [UNK]?)"
