"""The share of tokens that training predicts. Imports no numpy: the pipeline's settings and stages read it."""

from __future__ import annotations

from dataclasses import dataclass

#: The share in BERT's paper (Devlin et al. 2018, section 3.1), and in all held-out examples.
MASKED_LM_PROB = 0.15


@dataclass(frozen=True)
class MaskRate:
    """Share of a sequence's tokens to predict: at the first and at the last of the steps in which it falls."""

    first: float = MASKED_LM_PROB
    last: float = MASKED_LM_PROB

    @classmethod
    def of(cls, first: float | None, last: float | None) -> MaskRate:
        """None means `MASKED_LM_PROB` for `first`, and `first` for `last`."""
        first = MASKED_LM_PROB if first is None else first
        return cls(first, first if last is None else last)

    def at(self, step: int, falling: range) -> float:
        """The share at step `step`, from 0: linear over the steps `falling`, constant before and after them."""
        done = (step - falling.start) / max(1, len(falling) - 1)
        return self.first + (self.last - self.first) * min(1.0, max(0.0, done))

    def averaged(self, falling: float) -> MaskRate:
        """A rate that begins with this one's mean over many steps, in a share `falling` of which it falls, and has at
        most as many masked positions."""
        return MaskRate(self.first + (self.last - self.first) * falling / 2, max(self.first, self.last))

    def most(self, seq_len: int, sequences_per_row: int) -> int:
        """Most masked positions in a row at any step: for each of its sequences the share, rounded, or one."""
        return int(seq_len * max(self.first, self.last)) + sequences_per_row
