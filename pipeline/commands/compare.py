"""`python -m pipeline compare [SWEEP.toml]`: trials side by side, in the terminal and as a page."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from common.errors import UserError
from pipeline.settings.load import load
from pipeline.status.comparison import of_work_directory
from pipeline.status.stage_dirs import StageDirs
from pipeline.tasks.sweep import Sweep
from stages.view.comparison import LOSS, Comparison, Trial
from stages.view.text import columns, duration, number, sparkline

SUMMARY = "trials of a sweep, or all training runs: what differs, curves, losses, time, the winner; also as a page"
_CURVE_WIDTH = 40


def text(comparison: Comparison) -> str:
    """The table, the curves of the training loss on one scale, and the winner, or why there is none."""
    trials = comparison.trials
    over_steps = _drawing("training loss over steps", trials, [trial.own_steps for trial in trials], number)
    over_time = _drawing("training loss over time", trials, [trial.elapsed for trial in trials], duration)
    table = columns([comparison.head, *comparison.rows])
    return "\n".join([*table, *over_steps, *over_time, "", comparison.headline])


def _drawing(
    title: str, trials: Sequence[Trial], axes: Sequence[Sequence[float]], said: Callable[[float], str]
) -> list[str]:
    """The trials' curves, drawn as far as each one got, with the first and last loss. `axes`: the position of each
    trial's steps, on the same scale; `said` writes its end. [] without a step."""
    curves = {
        trial.name: [
            (x, loss)
            for x, loss in zip(axis, trial.curves.values[LOSS], strict=True)
            if 0 < x < math.inf and math.isfinite(loss)
        ]
        for trial, axis in zip(trials, axes, strict=True)
    }
    curves = {name: curve for name, curve in curves.items() if curve}
    if not curves:
        return []
    end = max(curve[-1][0] for curve in curves.values())
    drawn = {name: _parts(curve, end) for name, curve in curves.items()}
    every = [value for values in drawn.values() for value in values]
    low, high = min(every), max(every)
    lines = [
        (name, sparkline(values, low, high).ljust(_CURVE_WIDTH), f"{number(values[0])} → {number(values[-1])}")
        for name, values in drawn.items()
    ]
    return ["", f"{title} (to {said(end)})", *columns(lines)]


def _parts(curve: Sequence[tuple[float, float]], end: float) -> list[float]:
    """The mean loss in each of `_CURVE_WIDTH` equal parts of the axis up to `end`, until the curve ends. A part without
    a step has the loss of the part before it, or of the first step."""
    parts: list[list[float]] = [[] for _ in range(_CURVE_WIDTH)]
    for x, loss in curve:
        at = math.ceil(_CURVE_WIDTH * x / end) - 1  # each part includes its end
        parts[min(max(at, 0), _CURVE_WIDTH - 1)].append(loss)
    while not parts[-1]:
        parts.pop()
    means = [curve[0][1]]
    for part in parts:
        means.append(math.fsum(part) / len(part) if part else means[-1])
    return means[1:]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sweep", nargs="?", metavar="FILE", help="a sweep's TOML file (default: all training runs of WORK)"
    )
    parser.add_argument("--out", type=Path, help="where to write the page (default: WORK/compare[-SWEEP].html)")


def run(args: argparse.Namespace) -> int:
    """Print the comparison and write the page. Raises `UserError` if there is nothing to compare."""
    work_dir = load().work_dir
    if args.sweep is not None:
        sweep = Sweep(grid=args.sweep)
        comparison, path = sweep.comparison(), sweep.page
    else:
        comparison, path = of_work_directory(StageDirs(work_dir)), work_dir / "compare.html"
        if not comparison.trials:
            raise UserError(
                f"there is no training run in {work_dir}; start one with `luigi --module pipeline BertPhase1`"
            )
    from stages.view.comparison_page import page
    from stages.view.page import write_page

    print(text(comparison))
    write_page(args.out or path, page(comparison, time.time()))
    print(f"page: {args.out or path}")
    return 0
