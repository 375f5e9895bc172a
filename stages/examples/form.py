"""The shape of examples; imports no numpy, because the options of a stage are made of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.data.hdf5 import Array

#: [CLS] A [SEP] B [SEP]
SPECIAL_POSITIONS = 3
#: Sequences in a packed row, at most.
PACKED_SEQUENCES = 16


@dataclass(frozen=True)
class RowCapacity:
    """What a row holds, at most."""

    tokens: int
    masked: int
    sequences: int


@dataclass(frozen=True)
class Form:
    """The shape of a phase's examples and how they are drawn."""

    seq_len: int
    max_pred_len: int
    #: Times that each document is cut and masked anew.
    dupe_factor: int = 5
    #: Share of a sequence's tokens that are to be predicted.
    masked_lm_prob: float = 0.15
    #: Share of documents whose examples are cut to a random shorter length.
    short_seq_prob: float = 0.1
    whole_word_mask: bool = False
    #: Examples that may share a row; 1: each has a row of its own.
    sequences_per_row: int = 1

    @property
    def row(self) -> RowCapacity:
        return RowCapacity(self.seq_len, self.max_pred_len, self.sequences_per_row)

    def masked_positions(self, lengths: Array) -> Array:
        """How many positions of sequences of `lengths` tokens are masked."""
        return (lengths * self.masked_lm_prob).round().astype("int64").clip(1, self.max_pred_len)
