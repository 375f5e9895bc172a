"""BERT's micro-batches.

B: rows in the micro-batch, S: tokens in a row, M: masked positions and Q: sequences in the whole micro-batch. A row is
one sequence or, if packed, several that do not attend to each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from trainer.data.batch import Batch
from trainer.parallel.plan import padded_length

#: Label of padding among masked positions and sequences (ignore_index of torch and Hugging Face).
IGNORED = -100


def filled_up(length: int) -> int:
    """`length` rounded up to a multiple of 16, so that there are few sizes: oneDNN compiles kernels for each size, and
    blocks of ever new sizes fragment the heap (docs/decisions.md)."""
    return padded_length(length, 16)


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


@dataclass(frozen=True)
class PackedBertBatch(BertBatch):
    """A micro-batch of packed rows."""

    #: (R,) cumulative lengths: where each sequence and each row's padding begins in the flattened micro-batch, and its
    #: end. With static shapes some are empty.
    cu_seqlens: Tensor

    @property
    def packed_bounds(self) -> Tensor | None:
        return self.cu_seqlens
