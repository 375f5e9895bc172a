"""Where a training run's time went, from its attempts and the records of its steps.

Goodput is the share of the time since the first start spent on steps that were kept. The rest is lost: to
steps that were done again, to starting, to waiting for data or checkpoints, to compilation, to being down.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from common.files import METRICS
from stages.directory.attempts import Attempt, Wait
from stages.view.curves import Curves, MetricsFile
from stages.view.text import duration, percent
from trainer.checkpoint.directory import CHECKPOINTS, abandoned, whole_checkpoints

#: The parts, in the order of a step's life; each second belongs to one of them.
STEPS, DATA, STALL, COMPILING, STARTING, LOST, ENDING, DOWN = (
    *("computing", "waiting for data", "waiting for checkpoints", "compiling", "starting"),
    *("steps done again", "ending", "down"),
)
_WAITS = get_args(Wait)
#: Ends of an attempt after which its last steps are done again.
_IS_LOST = ("killed", "failed", "hung")


@dataclass(frozen=True)
class Goodput:
    """Seconds from the first start to the end, or to now, by part."""

    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def share(self) -> float | None:
        """None before the first step."""
        return self.seconds[STEPS] / self.total_s if self.seconds.get(STEPS) else None

    @property
    def losses(self) -> list[tuple[str, float]]:
        """What was lost, in seconds, largest first."""
        found = [(part, seconds) for part, seconds in self.seconds.items() if part != STEPS and seconds > 0]
        return sorted(found, key=lambda one: -one[1])

    def record(self) -> dict[str, Any]:
        """For a manifest; the parts are in the order of their size."""
        share = None if self.share is None else round(self.share, 4)
        parts = sorted(self.seconds.items(), key=lambda one: -one[1])
        return {"share": share, "seconds": {part: round(seconds, 3) for part, seconds in parts}}

    def __str__(self) -> str:
        """`goodput 91.3%; lost: starting 1 min 10 s, down 31 s`."""
        if self.share is None:
            return ""
        lost = ", ".join(f"{part} {duration(seconds)}" for part, seconds in self.losses[:3])
        return f"goodput {percent(self.share)}" + (f"; lost: {lost}" if lost else "")


def goodput_of(directory: Path, attempts: Sequence[Attempt], curves: Curves) -> Goodput:
    """Of the training in `directory`. Steps that were set aside with a checkpoint do not count, nor do those after the
    newest checkpoint, unless it runs: they are done again."""
    places, count = directory / CHECKPOINTS, len(curves.steps)
    if attempts and attempts[-1].how not in ("running", "complete"):
        newest = next((step for step, _ in whole_checkpoints(places)), 0)
        count = bisect.bisect_right(curves.steps, newest)
    recorded = [curves, *(MetricsFile(place / METRICS).read() for place in abandoned(places))]
    undone = {time for one in recorded for time in one.times} - set(curves.times[:count])
    return goodput(attempts, curves, count, sorted(undone))


def goodput(
    attempts: Sequence[Attempt], curves: Curves, count: int | None = None, undone: Sequence[float] = ()
) -> Goodput:
    """`attempts`: oldest first. Steps recorded before the first attempt belong to another training run or machine.
    `count`: how many steps count, all by default. `undone`: when others were recorded, in ascending order."""
    if not attempts:
        return Goodput()
    parts = dict.fromkeys((STEPS, DATA, STALL, COMPILING, STARTING, LOST, ENDING, *_WAITS, DOWN), 0.0)
    usual_s, times = _usual_step(curves), curves.times[:count]
    at = min([attempts[0].started, *(began for _, began, _ in attempts[0].waits)])
    for attempt in attempts:
        for what, began, until in attempt.waits:
            began, until = max(began, at), min(until, attempt.started)
            if until > began:
                parts[DOWN] += began - at
                parts[what] += until - began
                at = until
        began = max(attempt.started, at)
        parts[DOWN] += began - at
        steps = _steps_of(attempt, times)
        since = times[steps[-1]] if steps else attempt.started
        was_undone = bisect.bisect(undone, since) < bisect.bisect(undone, attempt.ended)
        rest = LOST if was_undone or attempt.how in _IS_LOST else ENDING if steps else STARTING
        _add_attempt(parts, attempt, began, steps, curves, usual_s, rest)
        at = max(began, attempt.ended)
    return Goodput(parts)


def _add_attempt(
    parts: dict[str, float], attempt: Attempt, began: float, steps: Sequence[int], curves: Curves, usual_s: float,
    rest: str,
) -> None:  # fmt: skip
    """`steps`: indices of those that count. `rest`: the part of the time after the last one."""
    at, values = began, curves.values
    for number, index in enumerate(steps):
        ended = max(at, min(curves.times[index], attempt.ended))
        step_s = min(values["step_time_s"][index], ended - at)
        # Before the first step, the process starts; between two, steps that were not finite were discarded.
        parts[STARTING if number == 0 else LOST] += ended - at - step_s
        data_s = min(_number(values["data_wait_s"][index]), step_s)
        stall_s = min(_number(values["checkpoint_stall_s"][index]), step_s - data_s)
        rest_s = step_s - data_s - stall_s
        compiled_s = max(0.0, rest_s - usual_s) if _compiled(curves, steps, number) else 0.0
        for part, seconds in ((DATA, data_s), (STALL, stall_s), (COMPILING, compiled_s), (STEPS, rest_s - compiled_s)):
            parts[part] += seconds
        at = ended
    parts[rest] += max(0.0, attempt.ended - at)


def _steps_of(attempt: Attempt, times: Sequence[float]) -> range:
    """Indices of the steps that were recorded during the attempt, out of all that count."""
    first = next((i for i, time in enumerate(times) if time > attempt.started), len(times))
    last = next((i for i in range(first, len(times)) if times[i] > attempt.ended), len(times))
    return range(first, last)


def _compiled(curves: Curves, steps: Sequence[int], number: int) -> bool:
    """Whether graphs were compiled in the step."""
    now = curves.values["compiled_graphs"][steps[number]]
    before = curves.values["compiled_graphs"][steps[number - 1]] if number else 0.0
    return _number(now) > _number(before)


def _usual_step(curves: Curves) -> float:
    """The median time of a step, in seconds."""
    return statistics.median(curves.values["step_time_s"]) if curves.steps else 0.0


def _number(value: float) -> float:
    """0 for what older records lack."""
    return 0.0 if math.isnan(value) else value
