"""Training curves: metrics.jsonl, read incrementally, and downsampled for charts."""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Fields kept from each step's record.
NAMES = (
    *("loss", "masked_lm_loss", "next_sentence_loss", "learning_rate", "throughput", "grad_norm", "step_time_s"),
    *("data_wait_s", "checkpoint_stall_s", "compiled_graphs"),
)


@dataclass
class Curves:
    """The steps of one phase, oldest first."""

    #: Global optimizer steps.
    steps: list[int] = field(default_factory=list)
    #: Unix time of each record, in seconds.
    times: list[float] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in NAMES})

    #: (step, cause) of each of the plateau doctor's warnings.
    diagnoses: list[tuple[int, str]] = field(default_factory=list)

    def last(self, name: str) -> float | None:
        values = self.values[name]
        return values[-1] if values else None

    def recent(self, name: str, until: int | None = None) -> float | None:
        """The mean over the last 50 steps, up to step `until`; None without steps, or if they do not record it."""
        end = len(self.steps) if until is None else bisect.bisect_right(self.steps, until)
        values = self.values[name][max(0, end - 50) : end]
        mean = sum(values) / len(values) if values else math.nan
        return None if math.isnan(mean) else mean

    def step_after(self, time: float) -> int | None:
        """The first step recorded after `time`; None if there is none."""
        at = bisect.bisect_right(self.times, time)
        return self.steps[at] if at < len(self.steps) else None


class MetricsFile:
    """metrics.jsonl of a training run; each further read parses only what was appended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._forget()

    def _forget(self) -> None:
        self._offset = 0
        self._curves = Curves()

    def read(self) -> Curves:
        """Read all records. A resumed training truncates its file, which is then read from the start."""
        try:
            with self._path.open("rb") as file:
                if not self._goes_on(file.seek(0, 2), file):
                    self._forget()
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._offset += len(line)
                    self._add(line)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            self._forget()
        return self._curves

    def _goes_on(self, size: int, file: Any) -> bool:
        """Whether the file continues with the next step after the part already read."""
        if size <= self._offset or not self._curves.steps:
            return size == self._offset
        file.seek(self._offset)
        line = file.readline()
        try:
            return not line.endswith(b"\n") or bool(json.loads(line)["step"] == self._curves.steps[-1] + 1)
        except (ValueError, TypeError, KeyError, RecursionError):
            return False

    def _add(self, line: bytes) -> None:
        """Add a step's record; skips malformed lines, as a power loss leaves them."""
        try:
            record = json.loads(line)
            step, time = int(record["step"]), float(record["time"])
            values = {name: float(record.get(name, math.nan)) for name in NAMES}
            diagnoses = [(step, str(one["cause"])) for one in record.get("diagnoses", ())]
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            return
        self._curves.steps.append(step)
        self._curves.times.append(time)
        self._curves.diagnoses += diagnoses
        for name, value in values.items():
            self._curves.values[name].append(value)


@dataclass(frozen=True)
class Point:
    """The mean, smallest and largest value over the steps `first` … `last`."""

    first: float
    last: float
    mean: float
    low: float
    high: float


def points(steps: Sequence[float], values: Sequence[float], most: int) -> list[Point]:
    """Downsample a curve to at most `most` points, each over the same number of steps (the last over the rest)."""
    size = max(1, math.ceil(len(steps) / most))
    found = []
    for start in range(0, len(steps), size):
        part = values[start : start + size]
        if not any(map(math.isnan, part)):
            last = steps[min(start + size, len(steps)) - 1]
            found.append(Point(steps[start], last, math.fsum(part) / len(part), min(part), max(part)))
    return found
