"""`python -m pipeline status`: each stage, its state, when, how long, where."""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import textwrap

from common.console import clock
from common.files import local_time
from pipeline.commands.watch import watch
from pipeline.status.live_report import view
from pipeline.status.states import statuses
from pipeline.tasks.bert import BertPhase2
from pipeline.tasks.everything import Everything
from stages.view.status import StageStatus

SUMMARY = "one table: each stage, its state, when, how long, where"


def table(found: list[StageStatus], width: int) -> str:
    """Format the table in at most `width` characters per line, as far as words allow.

    If it is too wide, paths are shortened to their ends, then columns move below their row, like details.
    """
    columns: dict[str, list[str]] = {
        "stage": [row.stage for row in found],
        "state": [row.state for row in found],
        "when": ["" if row.when is None else local_time(row.when) for row in found],
        "how long": ["" if row.seconds is None else clock(row.seconds) for row in found],
        "where": [str(row.directory or "") for row in found],
    }
    widths, legend = _widths(columns), ""
    if sum(widths.values()) + 2 * len(widths) - 2 > width and any(columns["where"]):
        # The first column already shows the start of STAGE-0123456789.
        parent = next(os.path.dirname(path) for path in columns["where"] if path)
        columns["where"] = [f"…-{path[-10:]}" if path else "" for path in columns["where"]]
        widths, legend = _widths(columns), f"where: {os.path.join(parent, 'STAGE-…')}"
    beside, below = list(columns), list[str]()
    while len(beside) > 2 and sum(widths[name] + 2 for name in beside) - 2 > width:
        below.insert(0, beside.pop())
    lines = ["  ".join(name.ljust(widths[name]) for name in beside).rstrip()]
    for at, row in enumerate(found):
        line = "  ".join(columns[name][at].ljust(widths[name]) for name in beside).rstrip()
        texts = [row.detail, *(columns[name][at] for name in below)]
        short = f"{row.stage:{widths['stage']}}  {row.state:{widths['state']}}  {row.detail}"
        if not any(columns[name][at] for name in ("when", "how long", "where")) and len(short) <= width:
            line, texts = short.rstrip(), []
        lines.append(line)
        for text in texts:
            # Paths are not wrapped, so that they can be copied.
            lines += textwrap.wrap(
                text, width, initial_indent="  ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
            )
    return "\n".join([*lines, legend] if legend else lines)


def _widths(columns: dict[str, list[str]]) -> dict[str, int]:
    return {name: max(map(len, [name, *cells])) for name, cells in columns.items()}


def add_options(parser: argparse.ArgumentParser) -> None:
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="for programs: a list with one object for each stage")
    how.add_argument(
        "--watch", type=_seconds, nargs="?", const=2.0, metavar="SECONDS",
        help="with curves and progress, redrawn every SECONDS (2) until Ctrl-C",
    )  # fmt: skip


def _seconds(text: str) -> float:
    if not (text.replace(".", "", 1).isdigit() and 0.1 <= float(text) <= 86400):
        raise argparse.ArgumentTypeError(f"{text} is not allowed; allowed: 0.1 … 86400 seconds")
    return float(text)


def run(args: argparse.Namespace) -> int:
    """Print the table; returns 0 for any states."""
    goal = Everything()
    if args.watch is not None:
        bert = BertPhase2()
        return watch(functools.partial(view, bert), lambda width: table(statuses(goal), width), args.watch)
    found = statuses(goal)
    if args.json:
        print(json.dumps([row.to_json() for row in found], indent=2))
    else:
        # In a file or pipe, lines are not shortened.
        print(table(found, shutil.get_terminal_size((10_000, 24)).columns))
    return 0
