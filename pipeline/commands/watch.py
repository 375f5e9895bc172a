"""`python -m pipeline status --watch`: states, curves and progress, redrawn in place."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from stages.view import facts
from stages.view.curves import MetricsFile, points
from stages.view.run import Run
from stages.view.text import duration, moment, number, sparkline

_WIDEST = 72
#: Metric, title.
_CURVES = (
    ("loss", "loss"), ("learning_rate", "learning rate"), ("throughput", "sequences/s"), ("grad_norm", "gradient norm"),
)  # fmt: skip
_NAME_WIDTH = 15
#: ANSI: cursor to the start of the n-th line up; clear from the cursor to the end of the screen.
_UP, _CLEAR = "\x1b[{}F", "\x1b[J"


def screen(run: Run, table: Callable[[int], str], width: int) -> str:
    """Render the screen, in lines of at most `width` characters as far as words allow; `table` formats the states."""
    lines = [f"BERT pretraining: {run.headline[1]}"[:width], moment(run.written, seconds=True)]
    lines += [line for stage in run.stages for line in _bar(stage.done, stage.total, stage.left_s, stage.state, width)]
    lines += ["", table(width), ""]
    lines += _curves(run, min(width, _NAME_WIDTH + _WIDEST + 26))
    lines += [f"{name}: {value} ({more})"[:width] for name, value, more in facts.at_a_glance(run)]
    for stage in run.stages:
        if stage.stops:
            ends = ", ".join(attempt.how for attempt in stage.attempts if attempt.how not in ("complete", "running"))
            lines.append(f"{stage.stage} was started {len(stage.attempts)} times: {ends}"[:width])
    if run.model is not None:
        lines.append(f"model: {run.model}")
    return "\n".join(lines)


def _bar(done: int | None, total: int | None, left_s: float | None, state: str, width: int) -> list[str]:
    if state != "running" or done is None or not total:
        return []
    left = "" if left_s is None else f", {duration(left_s)} left"
    text = f" {done / total:4.0%}{left}"
    room = max(4, min(_WIDEST, width - len(text)))
    full = round(done / total * room)
    return ["█" * full + "░" * (room - full) + text]


def _curves(run: Run, width: int) -> list[str]:
    """A sparkline per metric: both phases with a divider, and the first and latest value."""
    if not run.curves:
        return []
    ends = 24
    room = width - _NAME_WIDTH - ends - (len(run.curves) - 1)
    lengths = [len(curves.steps) for curves in run.curves.values()]
    # As on the report page, the shorter phase gets at least a third of the width.
    share = min(max(lengths[0] / sum(lengths), 1 / 3), 2 / 3) if len(lengths) == 2 else 1.0
    rooms = [int(share * room), room - int(share * room)]
    lines = []
    for name, title in _CURVES:
        parts = [
            [point.mean for point in points(curves.steps, curves.values[name], max(1, part))]
            for curves, part in zip(run.curves.values(), rooms, strict=False)
        ]
        every = [value for part in parts for value in part]
        if every and room >= 8:
            drawn = "│".join(sparkline(part, min(every), max(every)) for part in parts)
            lines.append(f"{title:{_NAME_WIDTH}}{drawn} {number(parts[0][0])} → {number(parts[-1][-1])}")
    return [*lines, ""]


def watch(view: Callable[[dict[Path, MetricsFile]], Run], table: Callable[[int], str], interval_s: float) -> int:
    """Redraw until Ctrl-C or a broken pipe; returns 0. In a pipe or file, screens are appended as plain text."""
    metrics: dict[Path, MetricsFile] = {}
    drawn = 0
    try:
        while True:
            size = shutil.get_terminal_size((100, 10_000))
            text = screen(view(metrics), table, size.columns)
            if sys.stdout.isatty():
                # Lines that scrolled off cannot be overwritten; a wrapped line counts as several.
                lines = _folded(text, size.columns)[: size.lines - 1]
                sys.stdout.write((_UP.format(drawn) if drawn else "") + _CLEAR + "\n".join(lines) + "\n")
                drawn = len(lines)
            else:
                sys.stdout.write(text + "\n\n")
            sys.stdout.flush()
            time.sleep(interval_s)
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:
        sys.stdout = None  # prevents the flush at exit
        return 0


def _folded(text: str, width: int) -> list[str]:
    return [line[at : at + width] for line in text.split("\n") for at in range(0, max(1, len(line)), width)]
