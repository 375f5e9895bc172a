"""BERT's micro-batches.

B: rows in the micro-batch, S: tokens in a row, M: masked positions and Q: sequences in the whole micro-batch. A row is
one sequence, or, packed, several that do not see each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from trainer.data.batch import Batch
from trainer.parallel.plan import padded_length

#: Label of a masked position or sequence that only fills up a micro-batch (torch's and Hugging Face's ignore_index).
IGNORED = -100


def filled_up(length: int) -> int:
    """What is filled up, for few sizes: a multiple of 16. oneDNN compiles kernels for each size, and blocks of ever new
    ones leave holes in the heap (docs/decisions.md)."""
    return padded_length(length, 16)


@dataclass(frozen=True)
class BertBatch(Batch):
    """One micro-batch. All int64."""

    #: (B, S) token ids.
    input_ids: Tensor
    #: (B, S) 0 for the first sentence and padding, 1 for the second sentence.
    segment_ids: Tensor
    #: (B, S) the number of a token's sequence in its row, from 1; 0 in padding.
    sequence_ids: Tensor
    #: (B, S) places in the sequences, from 0; (1, S) where they are the same in all rows.
    position_ids: Tensor
    #: (M,) places of the masked tokens in the flattened (B·S,) micro-batch.
    masked_index: Tensor
    #: (M,) ids that were there, `IGNORED` where the place is only a filler.
    masked_labels: Tensor
    #: (Q,) places of the sequences' [CLS] in the flattened micro-batch; None: they have no next-sentence labels.
    first_index: Tensor | None
    #: (Q,) 1 if the second sentence is a random one, `IGNORED` where the place is only a filler; None as above.
    next_sentence_labels: Tensor | None

    @property
    def packed_bounds(self) -> Tensor | None:
        """Of packed rows, see `PackedBertBatch.cu_seqlens`."""
        return None


@dataclass(frozen=True)
class PackedBertBatch(BertBatch):
    """A micro-batch of packed rows."""

    #: (R,) ascending: where the sequences, and the padding behind them, begin in the flattened micro-batch, and its
    #: end. With static shapes there are empty ones.
    cu_seqlens: Tensor

    @property
    def packed_bounds(self) -> Tensor | None:
        return self.cu_seqlens
