"""BERT's examples: rows of shards as the micro-batches that the model takes.

R: rows, S: tokens in a row, P: most masked positions in a row, K: most sequences in a packed row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from common.errors import UserError
from trainer.data.bert_batch import IGNORED, BertBatch, PackedBertBatch, filled_up
from trainer.data.masking import DynamicMasking
from trainer.data.order import Samples
from trainer.data.shards import LENGTHS_KEY, MASKED_KEYS, NEXT_SENTENCE_KEY, ShardSet
from trainer.data.validation import value_limits
from trainer.data.vocabulary import VOCABULARY_FILE

Arrays = dict[str, NDArray[np.integer[Any]]]
#: Of a micro-batch: masked positions, sequences, tokens, pairs of tokens.
Counts = tuple[int, int, int, int]


class BatchReader:
    """Reads BERT's examples from shards; a packed row holds several sequences."""

    rows_at_once = 1

    def __init__(
        self,
        shards: ShardSet,
        *,
        vocab_size: int,
        static_shapes: bool = False,
        without_padding: bool = False,
        dynamic_masking: DynamicMasking | None = None,
    ) -> None:
        """With `static_shapes` every micro-batch of B rows has B·P masked positions, and B·K sequences if it is packed;
        else as many as there are, `filled_up`. What fills it up is labelled `IGNORED`. `without_padding`: the
        padding of rows is not computed, and so not counted. `dynamic_masking`: for shards without masks, whose
        vocabulary must have at most `vocab_size` entries.
        """
        if dynamic_masking is not None and dynamic_masking.vocabulary.size > vocab_size:
            raise UserError(
                f"{shards.directory / VOCABULARY_FILE} has {dynamic_masking.vocabulary.size} entries, the model "
                f"{vocab_size}; use the model the data was made for"
            )
        self._masking = dynamic_masking
        self._first_row = np.cumsum(shards.rows_per_shard) - shards.rows_per_shard
        self._shards = shards
        self._vocab_size = vocab_size
        self._static_shapes = static_shapes
        self._counts_padding = not without_padding

    def micro_batches(
        self, samples: Samples, size: int, *, step: int = 0, epoch: int = 0
    ) -> tuple[list[BertBatch], list[Counts]]:
        """See `Reader`; the losses are sums over masked positions and over sequences. It also counts tokens, and the
        pairs of tokens that attention compares: without padding in packed rows; in others with it, if it is computed.

        Raises `UserError` on an id outside the vocabulary.
        """
        arrays = self.read(samples)
        numbers = self._first_row[samples.shard] + samples.row
        batches, counts = [], []
        for start in range(0, len(samples), size):
            part = {key: value[start : start + size] for key, value in arrays.items()}
            masked = self._masked(part, numbers[start : start + size], step, epoch)
            batches.append(self._micro_batch(part, *masked))
            counts.append((len(masked[0]), *_counts(part, padded=self._counts_padding)))
        return batches, counts

    def read(self, samples: Samples) -> Arrays:
        """The rows of `samples`, in their order, with one read for each shard."""
        by_shard = np.argsort(samples.shard, kind="stable")
        shards, starts = np.unique(samples.shard[by_shard], return_index=True)
        pieces = [
            self._shards.read(int(shard), samples.row[where])
            for shard, where in zip(shards, np.split(by_shard, starts[1:]), strict=True)
        ]
        back = np.empty(len(samples), dtype=np.int64)
        back[by_shard] = np.arange(len(samples))
        arrays = {key: np.concatenate([piece[key] for piece in pieces])[back] for key in self._shards.keys}
        self._require_limits(arrays, samples)
        return arrays

    def _require_limits(self, arrays: Arrays, samples: Samples) -> None:
        """Raise `UserError`, naming file, row and value, if a value is not one that the model takes."""
        seq_len = self._shards.seq_len
        known = self._vocab_size if self._masking is None else self._masking.vocabulary.size
        for key, limit in value_limits(seq_len, known).items():
            if key not in arrays:
                continue
            values = arrays[key].reshape(len(samples), -1)
            if key == LENGTHS_KEY:
                values = values.sum(axis=1, keepdims=True)
            wrong = int(values.max()) if int(values.max()) >= limit else min(0, int(values.min()))
            if not wrong:
                continue
            row = int((values == wrong).any(axis=1).argmax())
            name, at = self._shards.names[samples.shard[row]], samples.row[row]
            if key in ("input_ids", "masked_lm_ids"):
                whose, mend = "model's", "use the model the data was made for, or the data made for the model"
                if self._masking is not None:
                    whose, mend = "data set's", f"put the {VOCABULARY_FILE} beside the shards that they were made with"
                raise UserError(
                    f"{name}: {key} of row {at} holds id {wrong}, but the {whose} vocabulary has {limit}; {mend}"
                )
            raise UserError(
                f"{name}: {key} of row {at} holds {wrong}; allowed: 0 to {limit - 1} in rows of {seq_len} tokens; "
                f"fetch or make this file again"
            )
        mask = arrays["input_mask"]
        has_gap = np.greater(mask[:, 1:], mask[:, :-1]).any(axis=1)
        for what, wrong_rows in (("tokens after padding", has_gap), ("no tokens", mask[:, 0] == 0)):
            if wrong_rows.any():
                row = int(wrong_rows.argmax())
                raise UserError(
                    f"{self._shards.names[samples.shard[row]]}: input_mask of row {samples.row[row]} has {what}; "
                    f"allowed: 1 for all tokens and 0 after them; make this file again"
                )

    def _masked(
        self, arrays: Arrays, numbers: NDArray[np.int64], step: int, epoch: int
    ) -> tuple[NDArray[np.int64], NDArray[np.integer[Any]]]:
        """The masked positions in the flattened rows and their ids before masking; draws masks if `arrays` has none."""
        rows, seq_len = arrays["input_ids"].shape
        if self._masking is not None:
            lengths = arrays.get(LENGTHS_KEY, arrays["input_mask"].sum(axis=1, keepdims=True, dtype=np.int64))
            return self._masking.mask(arrays["input_ids"], lengths.astype(np.int64), numbers, step=step, epoch=epoch)
        positions = arrays["masked_lm_positions"].astype(np.int64)
        # Position 0 is a row's first [CLS], which is never masked: it marks the unused entries (NVIDIA's format).
        chosen = positions > 0
        return (seq_len * np.arange(rows)[:, None] + positions)[chosen], arrays["masked_lm_ids"][chosen]

    def _micro_batch(
        self, arrays: Arrays, masked_places: NDArray[np.int64], masked_ids: NDArray[np.integer[Any]]
    ) -> BertBatch:
        rows, seq_len = arrays["input_ids"].shape
        packed = LENGTHS_KEY in arrays
        first_of_row = seq_len * np.arange(rows)[:, None]
        masked_index, masked_labels = self._filled_up(masked_places, masked_ids, rows * self._most_masked)
        if packed:
            lengths = arrays[LENGTHS_KEY].astype(np.int64)
            starts, is_sequence = np.cumsum(lengths, axis=1) - lengths, lengths > 0
            runs = np.append(lengths, seq_len - lengths.sum(1, keepdims=True), axis=1)
            sequence_ids, position_ids = _places(runs)
        else:
            starts, is_sequence = np.zeros((rows, 1), np.int64), np.ones((rows, 1), bool)
            sequence_ids, position_ids = arrays["input_mask"].astype(np.int64), np.arange(seq_len)[None]
        first_index = next_sentence_labels = None
        if self._shards.next_sentence:
            labels = arrays[NEXT_SENTENCE_KEY].reshape(starts.shape)
            first_index, next_sentence_labels = self._filled_up(
                (first_of_row + starts)[is_sequence], labels[is_sequence], is_sequence.size
            )
        fields: dict[str, Any] = {
            "input_ids": as_int64(arrays["input_ids"]),
            "segment_ids": as_int64(arrays["segment_ids"]),
            "sequence_ids": as_int64(sequence_ids),
            "position_ids": as_int64(position_ids),
            "masked_index": masked_index,
            "masked_labels": masked_labels,
            "first_index": first_index,
            "next_sentence_labels": next_sentence_labels,
        }
        if not packed:
            return BertBatch(**fields)
        return PackedBertBatch(**fields, cu_seqlens=as_int64(self._bounds(runs.reshape(-1))))

    def _bounds(self, runs: NDArray[np.int64]) -> NDArray[np.int64]:
        """`PackedBertBatch.cu_seqlens`. `runs`: the lengths of sequences and padding, in order. Empty ones keep their
        entries with static shapes."""
        ends = np.cumsum(runs if self._static_shapes else runs[runs > 0])
        return np.concatenate([[0], ends])

    @property
    def _most_masked(self) -> int:
        """P."""
        if self._masking is not None:
            return self._masking.masking.rate.most(self._shards.seq_len, self._shards.sequences_per_row or 1)
        assert self._shards.max_pred_len is not None
        return self._shards.max_pred_len

    def _filled_up(
        self, index: NDArray[np.int64], labels: NDArray[np.integer[Any]], most: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`index` and `labels` with padding; at most `most` entries."""
        size = most if self._static_shapes else min(most, filled_up(len(index)))
        places, known = np.zeros(size, np.int64), np.full(size, IGNORED, np.int64)
        places[: len(index)], known[: len(index)] = index, labels
        return as_int64(places), as_int64(known)


def _counts(arrays: Arrays, *, padded: bool) -> tuple[int, int, int]:
    """Sequences, tokens, pairs of tokens; if `padded`, rows that are not packed count with their padding."""
    rows, seq_len = arrays["input_ids"].shape
    if LENGTHS_KEY not in arrays and padded:
        return rows, rows * seq_len, rows * seq_len**2
    lengths = arrays[LENGTHS_KEY] if LENGTHS_KEY in arrays else arrays["input_mask"].sum(axis=1, keepdims=True)
    lengths = lengths.astype(np.int64)
    return int(np.count_nonzero(lengths)), int(lengths.sum()), int((lengths**2).sum())


def _places(runs: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each token of packed rows (B, S): the number of its sequence, from 1, and its position in it; 0 in padding.

    `runs` (B, K + 1): the lengths of each row's sequences and of its padding; they add up to S.
    """
    rows, slots = runs.shape
    numbers = np.tile(np.append(np.arange(1, slots), 0), rows)
    sequence_ids = np.repeat(numbers, runs.reshape(-1)).reshape(rows, -1)
    begins = np.repeat(np.cumsum(runs, axis=1) - runs, runs.reshape(-1)).reshape(rows, -1)
    position_ids = np.arange(sequence_ids.shape[1]) - begins
    return sequence_ids, np.where(sequence_ids > 0, position_ids, 0)


def unmasked(arrays: Arrays) -> NDArray[np.int64]:
    """The ids (R, S) of rows as they were before masking."""
    ids = arrays["input_ids"].astype(np.int64)
    if MASKED_KEYS[0] in arrays:
        positions, labels = (arrays[key].astype(np.int64) for key in MASKED_KEYS)
        row, entry = np.nonzero(positions)
        ids[row, positions[row, entry]] = labels[row, entry]
    return ids


def as_int64(array: NDArray[np.integer[Any]]) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int64))
