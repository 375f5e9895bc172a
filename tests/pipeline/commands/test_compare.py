"""The terminal's drawing of a comparison."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from pipeline.commands.compare import text
from stages.view.comparison import LOSS, Comparison, Trial
from stages.view.curves import NAMES, Curves
from stages.view.run import Run

BARS = "▁▂▃▄▅▆▇█"


def trial(name: str, losses: list[float], step_time_s: float, *, before: int = 0) -> Trial:
    """`before`: steps of the phase before."""
    run, steps = Run([]), len(losses)
    values = {**{key: [math.nan] * steps for key in NAMES}, LOSS: losses, "step_time_s": [step_time_s] * steps}
    run.curves = {1: Curves(list(range(before + 1, before + steps + 1)), [0.0] * steps, values)}
    return Trial(name, run)


def drawn(said: str, title: str) -> dict[str, tuple[str, str]]:
    """The curve and what is said beside it, by trial, under a title."""
    block = said.split(title)[1].split("\n\n")[0].splitlines()
    return {name: (bars, beside) for name, bars, beside in (re.split(r"\s{2,}", line) for line in block)}


def test_trials_are_drawn_on_the_same_axes() -> None:
    """Each as far as it got: half the steps, or four times the time; the heights are numpy's means of the steps."""
    long = list(np.linspace(8.0, 2.0, 400))
    said = text(Comparison("two", [trial("long", long, 0.5), trial("short", long[:200], 4.0)]))
    steps = drawn(said, "training loss over steps (to 400)\n")
    time = drawn(said, "training loss over time (to 13 min 20 s)\n")
    assert [len(steps[name][0]) for name in ("long", "short")] == [40, 20]
    assert [len(time[name][0]) for name in ("long", "short")] == [10, 40]
    sums, _ = np.histogram(np.arange(400), bins=40, range=(0, 400), weights=long)
    counts, _ = np.histogram(np.arange(400), bins=40, range=(0, 400))
    means = sums / counts
    heights = (means - means.min()) / (means.max() - means.min()) * 7
    assert np.abs(np.array([BARS.index(bar) for bar in steps["long"][0]]) - heights).max() <= 0.5 + 1e-9
    first, last = map(float, steps["long"][1].split(" → "))
    assert first == pytest.approx(means[0], rel=1e-3)
    assert last == pytest.approx(means[-1], rel=1e-3)


def test_the_steps_of_phase_2_are_its_own() -> None:
    """Their numbers go on from phase 1's."""
    losses = list(np.linspace(8.0, 2.0, 40))
    said = text(Comparison("one", [trial("second", losses, 1.0, before=2000)]))
    bars, _ = drawn(said, "training loss over steps (to 40)\n")["second"]
    assert len(bars) == 40
    assert all(
        abs(BARS.index(bar) - 7 * (loss - 2.0) / 6.0) <= 0.5 + 1e-9 for bar, loss in zip(bars, losses, strict=True)
    )


@pytest.mark.parametrize("damaged", [math.nan, math.inf, -1.0, 0.0])
def test_what_is_not_a_time_or_a_loss_is_left_out(damaged: float) -> None:
    said = text(Comparison("one", [trial("clock", [3.0, 2.0], damaged), trial("loss", [math.nan, math.inf], 1.0)]))
    assert drawn(said, "training loss over steps (to 2)\n").keys() == {"clock"}
    assert "over time" not in said


def test_few_steps_are_one_line_without_gaps() -> None:
    said = text(Comparison("one", [trial("three", [3.0, 2.0, 1.0], 1.0)]))
    assert drawn(said, "training loss over steps (to 3)\n")["three"] == (BARS[7] * 26 + BARS[4] * 13 + BARS[0], "3 → 1")


def test_without_steps_nothing_is_drawn() -> None:
    said = text(Comparison("none", [trial("new", [], 1.0)]))
    assert "training loss over" not in said
    assert said.endswith("no winner: no complete trial has recorded a loss")
