"""`python -m pipeline compare [SWEEP.toml]`: trials side by side, in the terminal and as a page."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from common.errors import UserError
from pipeline.commands.watch import sparkline
from pipeline.settings.load import load
from pipeline.status.comparison import of_work_directory
from pipeline.status.stage_dirs import StageDirs
from pipeline.tasks.sweep import Sweep
from stages.view.comparison import LOSS, Comparison
from stages.view.curves import points
from stages.view.text import columns

SUMMARY = "trials of a sweep, or all trainings: what differs, curves, losses, time, the winner; also as a page"
_CURVE_WIDTH = 40


def text(comparison: Comparison) -> str:
    """The table, the curves of the training loss on one scale, and the winner, or why there is none."""
    drawn = {
        trial.name: [point.mean for point in points(trial.curves.steps, trial.curves.values[LOSS], _CURVE_WIDTH)]
        for trial in comparison.trials
    }
    every = [value for values in drawn.values() for value in values]
    curves = [(name, sparkline(values, min(every), max(every))) for name, values in drawn.items() if values]
    lines = columns([comparison.head, *comparison.rows])
    drawing = ["", "training loss over steps", *columns(curves)] if curves else []
    return "\n".join([*lines, *drawing, "", comparison.headline])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sweep", nargs="?", metavar="FILE", help="a sweep's TOML file (default: all trainings of WORK)")
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
            raise UserError(f"there is no training in {work_dir}; start one with `luigi --module pipeline BertPhase1`")
    from stages.view.comparison_page import write

    print(text(comparison))
    write(args.out or path, comparison, time.time())
    print(f"page: {args.out or path}")
    return 0
