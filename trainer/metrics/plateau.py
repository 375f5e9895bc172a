"""The plateau doctor: says when a masked-LM training learns nothing but word frequencies, and the likely cause.

It only warns. Its evidence: facts about the examples (`DataFacts`), the loss against the unigram baseline of the same
labels, and how far the weights have moved (`Movement`). Healthy runs, too, stay at the baseline for hundreds of steps
before they learn context, so the loss alone is reason to warn only after `_PATIENCE_STEPS`. The thresholds lie between
what faulty and healthy runs measure (docs/decisions.md).
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from trainer.config import TrainConfig
from trainer.data.loader import Step
from trainer.metrics.data_facts import BatchFacts, DataFacts, Ids, examine
from trainer.metrics.movement import Movement

#: Steps whose mean loss is compared with the baseline.
_WINDOW = 40
#: Steps between two comparisons, and the first steps, counted from the start of this process, after which examples and
#: weights are looked at; later every `_LATER_STEPS`.
_COMPARE_STEPS, _LOOK_STEPS, _LATER_STEPS = 20, (20, 60, 100, 150, 190), 1000
#: Nats under the baseline from which a loss is no longer at the baseline.
_MARGIN = 0.05
#: Nats over it from which not even the frequencies are learned, and under it from which context certainly is.
_FAR = 0.5
#: A weight matrix's mean change in one step at the peak learning rate, as a share of its size, that is too large,
#: usual, and too small. Healthy: 0.002 … 0.13; 30 times the best rate: 0.23 … 1.4; a 300th: 2.5e-5 … 2e-4.
_CHANGE_MAX, _CHANGE_USUAL, _CHANGE_MIN = 0.17, 0.02, 4e-4
#: Steps at the full rate after which a loss that is not under the baseline proves the rate too large, and one far
#: above it, or one that has not fallen, proves the rate too small.
_AT_FULL_RATE = 40, 100
#: Steps after the warm-up, and share of the phase, after which a loss at the baseline is reported without a cause; and
#: such steps of a shorter phase, at whose end it is reported.
_PATIENCE_STEPS, _PATIENCE_SHARE, _PATIENCE_AT_END = 500, 0.2, 200
#: Causes that are over when the loss is under the baseline.
_OF_LOSS = {"plateau", "learning rate too high", "learning rate too low"}


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong, in a few words, and what was seen and what to do."""

    cause: str
    text: str

    def __str__(self) -> str:
        return f"warning: {self.cause}: {self.text}"


class Doctor:
    """Watches one phase in the root worker. `observe` may be called in a different thread from `record`."""

    def __init__(
        self, config: TrainConfig, vocab_size: int, weights: Mapping[str, Tensor] | None, *, are_masked: bool
    ) -> None:
        """`weights`: the encoder's matrices; None on a device where reading them would compile graphs. `are_masked`:
        the shards have masks."""
        self._config, self._are_masked = config, are_masked
        self._facts = DataFacts(vocab_size)
        self._movement = Movement(weights) if weights else None
        self._observed: dict[int, BatchFacts] = {}
        self._lock = threading.Lock()
        self._recent: collections.deque[tuple[float, Ids]] = collections.deque(maxlen=_WINDOW)
        #: How far the mean loss of this process's first `_WINDOW` steps was above the baseline of their labels.
        self._first_excess: float | None = None
        self._steps = 0
        #: Sum of the steps' learning rates, in peak learning rates.
        self._full_steps = 0.0
        #: The matrices' change per step, as a share of their size; None: not measured yet.
        self._change: float | None = None
        self._told: set[str] = set()
        #: The latest cause; one of `_OF_LOSS` until the loss is under the baseline.
        self.condition = ""

    def observe(self, step: Step) -> None:
        """Look at a step's micro-batches while they are on the host."""
        facts = examine(step.micro_batches, step.epoch, with_masks=self._are_masked)  # type: ignore[arg-type]
        with self._lock:
            self._observed[step.index] = facts

    def record(self, step: int, loss: float, learning_rate: float) -> list[Diagnosis]:
        """What to say after `step` steps of the phase (once each); `loss`: the step's mean masked-LM loss in nats."""
        with self._lock:
            facts = self._observed.pop(step - 1, None)
        if facts is None or not len(facts.labels):
            return []
        self._facts.add(facts)
        self._recent.append((loss, facts.labels))
        self._steps += 1
        self._full_steps += learning_rate / (self._config.lr or 1)
        found = []
        if self._steps in _LOOK_STEPS or self._steps % _LATER_STEPS == 0:
            found += self._look()
        is_time = self._steps % _COMPARE_STEPS == 0 or step == self._config.max_steps
        if is_time and len(self._recent) == _WINDOW:
            found += self._compare(step)
        fresh = [one for one in found if one.cause not in self._told]
        self._told |= {one.cause for one in fresh}
        if fresh:
            self.condition = fresh[-1].cause
        return fresh

    def _look(self) -> list[Diagnosis]:
        found = [Diagnosis(*fault) for fault in self._facts.faults()]
        if self._movement is not None:
            moved, frozen = self._movement.measure()
            if self._change is None and self._full_steps:
                self._change = moved / self._full_steps
            if frozen and self._steps > _LOOK_STEPS[0]:
                some = ", ".join(frozen[:2]) + (f" and {len(frozen) - 2} more" if len(frozen) > 2 else "")
                text = f"{some} did not change in {self._steps} steps, as others did: check that they get gradients"
                found.append(Diagnosis("frozen layer", text))
        return found

    def _compare(self, step: int) -> list[Diagnosis]:
        """Compare the loss with the baseline."""
        losses, labels = zip(*self._recent, strict=True)
        loss = float(np.mean(losses))
        baseline = self._facts.unigram.of(np.concatenate(labels))
        if self._first_excess is None:
            self._first_excess = loss - baseline
        since = step - self._config.warmup_steps
        at = f"after {step} steps the masked-LM loss is {loss:.2f}; always guessing by frequency gives {baseline:.2f}"
        if cause := self._wrong_rate(since, loss, baseline):
            lr, change = self._config.lr, self._change or 0.0
            better = lr * _CHANGE_USUAL / max(change, _CHANGE_USUAL / 1000)
            text = (
                f"{at}; at that rate weights change by {change:.2g} of their size a step (usual: 0.002 to 0.1): "
                f"try lr = {better:.1g} instead of {lr:.1g}"
            )
            return [Diagnosis(cause, text)]
        if loss < baseline - _MARGIN:
            if self.condition in _OF_LOSS:
                self._told.discard(self.condition)
                self.condition = ""
            return []
        if since < self._patience(is_end=step == self._config.max_steps) or self._told:
            return []
        moved = f"; weights change by {self._change:.2g} of their size a step" if self._change is not None else ""
        unseen = "" if self._movement is not None else "; weights are not examined on this device"
        return [
            Diagnosis(
                "plateau",
                f"{at}{moved or unseen}: nothing but frequencies has been learned yet, and the examples look sound; "
                f"train longer, try another learning rate (now {self._config.lr:.1g}), or look at some examples",
            )
        ]

    def _wrong_rate(self, since: int, loss: float, baseline: float) -> str | None:
        """The cause, if it is the learning rate, `since` steps after the warm-up."""
        if self._change is None or self._first_excess is None:
            return None
        high, low = _AT_FULL_RATE
        if self._change > _CHANGE_MAX and since >= high and loss > baseline - _MARGIN:
            return "learning rate too high"
        # Where the model begins with word vectors and log frequencies, its first loss is about the baseline.
        excess = loss - baseline
        has_fallen = self._steps < 2 * _WINDOW or excess < self._first_excess - _MARGIN or excess < -_FAR
        if self._change < _CHANGE_MIN and since >= low and (loss > baseline + _FAR or not has_fallen):
            return "learning rate too low"
        return None

    def _patience(self, *, is_end: bool) -> float:
        """Steps after the warm-up after which a loss at the baseline is reported."""
        if is_end:
            return _PATIENCE_AT_END
        return max(_PATIENCE_STEPS, _PATIENCE_SHARE * (self._config.max_steps - self._config.warmup_steps))
