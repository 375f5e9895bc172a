"""BERT's micro-batches.

B: rows in the micro-batch, S: tokens in a row, M: masked positions and Q: sequences in the whole micro-batch. A row is
one sequence or, if packed, several that do not attend to each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.data.batch import Batch
from trainer.parallel.plan import padded_length

#: Label of padding among masked positions and sequences (ignore_index of torch and Hugging Face).
IGNORED = -100


def filled_up(length: int) -> int:
    """`length` rounded up to a multiple of 16, so that there are few sizes: oneDNN compiles kernels for each size, and
    blocks of ever new sizes fragment the heap (docs/decisions.md)."""
    return padded_length(length, 16)


#: Number of lengths that micro-batches without padding can have, for a given number of rows.
_LENGTHS = 32


@dataclass(frozen=True)
class BertBatch(Batch):
    """One micro-batch. All int64."""

    #: (B, S) token ids.
    input_ids: Tensor
    #: (B, S) 0 for the first sentence and padding, 1 for the second sentence.
    segment_ids: Tensor
    #: (B, S) number of the token's sequence in its row, from 1; 0 in padding.
    sequence_ids: Tensor
    #: (B, S) positions within the sequences, from 0; (1, S) if all rows have the same.
    position_ids: Tensor
    #: (M,) indices of the masked tokens in the flattened (B·S,) micro-batch.
    masked_index: Tensor
    #: (M,) their ids before masking; `IGNORED` for padding.
    masked_labels: Tensor
    #: (Q,) indices of the sequences' [CLS] in the flattened micro-batch; None without next-sentence labels.
    first_index: Tensor | None
    #: (Q,) 1 if the second sentence is a random one, `IGNORED` for padding; None as above.
    next_sentence_labels: Tensor | None

    @property
    def packed_bounds(self) -> Tensor | None:
        """`PackedBertBatch.cu_seqlens` of packed rows, else None."""
        return None

    @property
    def max_seqlen(self) -> int:
        """No sequence is longer than this."""
        return self.input_ids.shape[1]

    def without_padding(self) -> UnpaddedBertBatch:
        """The same sequences, one after another in one row, on the host. The row is filled up, by at most a 32nd of
        the rows, so that few lengths occur: devices keep freed memory for blocks of the same size."""
        ids = self.sequence_ids.numpy()
        rows, seq_len = ids.shape
        is_real = (ids > 0).reshape(-1)
        tokens, place = int(np.count_nonzero(is_real)), np.maximum(np.cumsum(is_real) - 1, 0)
        # In faulty data, masked tokens may be in padding: they stay there.
        lost = ~is_real[self.masked_index.numpy()] & (self.masked_labels.numpy() != IGNORED)
        step = max(16, rows * seq_len // _LENGTHS)
        length = min(padded_length(tokens + int(lost.any()), step), rows * seq_len)
        of_sequence = (ids + (ids.max() + 1) * np.arange(rows)[:, None]).reshape(-1)[is_real]
        is_first = np.diff(of_sequence, prepend=-1) != 0
        # Runs of padding, too, are at most as long as a row.
        bounds = [*np.flatnonzero(is_first), *range(tokens, length, seq_len), length]

        def row(values: NDArray[np.int64]) -> Tensor:
            return torch.from_numpy(np.pad(values, (0, length - tokens))[None])

        def taken(values: Tensor) -> Tensor:
            return row(np.broadcast_to(values.numpy(), ids.shape).reshape(-1)[is_real])

        return UnpaddedBertBatch(
            taken(self.input_ids), taken(self.segment_ids), row(np.cumsum(is_first)), taken(self.position_ids),
            torch.from_numpy(np.where(lost, length - 1, place[self.masked_index.numpy()])), self.masked_labels,
            None if self.first_index is None else torch.from_numpy(place[self.first_index.numpy()]),
            self.next_sentence_labels, torch.tensor(bounds), seq_len,
        )  # fmt: skip


@dataclass(frozen=True)
class PackedBertBatch(BertBatch):
    """A micro-batch of packed rows."""

    #: (R,) cumulative lengths: where each sequence and each row's padding begins in the flattened micro-batch, and its
    #: end. With static shapes some are empty.
    cu_seqlens: Tensor

    @property
    def packed_bounds(self) -> Tensor | None:
        return self.cu_seqlens


@dataclass(frozen=True)
class UnpaddedBertBatch(PackedBertBatch):
    """A micro-batch of one row that has no padding except what fills it up."""

    #: Tokens in each row that it was made from: no run between two of `cu_seqlens` is longer.
    row_length: int

    @property
    def max_seqlen(self) -> int:
        return self.row_length
