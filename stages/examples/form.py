"""The shape of examples; imports no numpy, because a stage's options import this module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.data.mask_rate import MASKED_LM_PROB

if TYPE_CHECKING:
    from trainer.data.hdf5 import Array

#: [CLS] A [SEP] B [SEP], and [CLS] A [SEP]
SPECIAL_POSITIONS, SPECIAL_POSITIONS_ALONE = 3, 2
#: What a sequence is, in the terms of Liu et al. 2019 (RoBERTa), arXiv:1907.11692, section 4.2: two segments for
#: next-sentence prediction; or as many whole consecutive sentences as fit, from a part of the corpus or one document.
SEGMENT_PAIR, FULL_SENTENCES, DOC_SENTENCES = "segment-pair", "full-sentences", "doc-sentences"
#: Maximum sequences in a packed row.
PACKED_SEQUENCES = 16


@dataclass(frozen=True)
class RowCapacity:
    """Upper limits of a row: tokens, masked positions and sequences."""

    tokens: int
    masked: int
    sequences: int


@dataclass(frozen=True)
class Form:
    """The shape of a phase's examples and how they are drawn."""

    seq_len: int
    max_pred_len: int
    sequences: str = SEGMENT_PAIR
    #: Times each document is cut into pairs and masked, differently each time.
    dupe_factor: int = 5
    #: Share of a sequence's tokens to predict.
    masked_lm_prob: float = MASKED_LM_PROB
    #: Share of documents whose examples are cut to a random shorter length.
    short_seq_prob: float = 0.1
    whole_word_mask: bool = False
    #: Maximum examples per row; 1 disables packing.
    sequences_per_row: int = 1
    #: Whether the examples are masked; otherwise they are masked each time they are read.
    is_masked: bool = True

    @property
    def next_sentence(self) -> bool:
        """Whether the examples have next-sentence labels."""
        return self.sequences == SEGMENT_PAIR

    @property
    def row(self) -> RowCapacity:
        return RowCapacity(
            self.seq_len, self.max_pred_len if self.is_masked else self.sequences_per_row, self.sequences_per_row
        )

    def masked_positions(self, lengths: Array) -> Array:
        """Number of masked positions in sequences of `lengths` tokens; int64, same shape. 1 each if none are masked
        yet, which limits how many sequences a row has, not their tokens."""
        from trainer.data.masking import masked_positions

        return masked_positions(lengths, self.masked_lm_prob, self.max_pred_len if self.is_masked else 1)
