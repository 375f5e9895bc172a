"""The page of a comparison: its table, and the losses of all trials over steps and over time."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from markupsafe import Markup

from stages.view.chart import Series, line_chart
from stages.view.comparison import LOSS, Comparison, Trial
from stages.view.curves import points
from stages.view.page import MOST_POINTS, NARROW, WIDE, Chart, css, template
from stages.view.text import moment, number

_COLOURS = 8
#: Horizontal axes are in minutes from this many seconds on.
_LONG_S = 600


def page(comparison: Comparison, written: float) -> str:
    """Render the page as HTML. It loads no external resource and runs no script."""
    steps = [(trial, [float(step) for step in trial.own_steps]) for trial in comparison.trials]
    times = [(trial, trial.elapsed) for trial in comparison.trials]
    scale, unit = (60, "minutes") if max((x[-1] for _, x in times if x), default=0) >= _LONG_S else (1, "seconds")
    in_unit = [(trial, [second / scale for second in x]) for trial, x in times]
    marks = [
        (Markup('<path class="line p{}" d="M0 6H22"/>').format(at % _COLOURS + 1), trial.name)
        for at, trial in enumerate(comparison.trials)
    ]
    return template("comparison.html.jinja").render(
        comparison=comparison,
        css=css(),
        written=moment(written, seconds=True),
        marks=marks,
        charts=[
            _chart("Training loss over steps", "optimizer step", 1, steps),
            _chart("Training loss over time", "training time in " + unit, 0, in_unit),
        ],
    )


def _chart(title: str, axis: str, first: float, curves: Sequence[tuple[Trial, Sequence[float]]]) -> Chart | None:
    """The losses of all trials over `axis`, which begins at `first`; `curves`: the position of each step. None without
    points."""
    series = [
        Series(at % _COLOURS + 1, first, x[-1], points(x, trial.curves.values[LOSS], MOST_POINTS), name=trial.name)
        for at, (trial, x) in enumerate(curves)
        if x and not math.isnan(x[-1])
    ]
    if not any(one.points for one in series):
        return None
    unit = "nats per masked token"
    draw = functools.partial(line_chart, series, title=title, unit=unit, overlaid=True, axis=axis)
    rows = [
        [one.name, f"{number(point.first)} – {number(point.last)}", *map(number, (point.mean, point.low, point.high))]
        for one in series
        for point in one.points
    ]
    head = ("trial", axis, "mean", "smallest", "largest")
    return Chart(title, Markup(draw(width=WIDE, height=340)), Markup(draw(width=NARROW, height=250)), head, rows)
