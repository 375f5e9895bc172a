"""`python -m pipeline nights`: the state of each night; --check, for monitors, notifies if the last is not complete;
--trend shows what they have learned."""

from __future__ import annotations

import argparse
import datetime

from common.console import log
from common.errors import UserError
from common.files import local_time
from pipeline.settings.load import load
from pipeline.tasks.nights import directories, notify, records, states
from pipeline.tasks.nights.states import NightState

SUMMARY = (
    "how each night went; --check reports by mail and webhook if the last failed or is missing; --trend: their losses"
)
#: Number of nights listed.
_SHOWN = 30


def add_options(parser: argparse.ArgumentParser) -> None:
    one = parser.add_mutually_exclusive_group()
    one.add_argument(
        "--check",
        action="store_true",
        help="look at one night only: exit status 0 if it is complete (accepted or rejected) or running, else 1, "
        "reported by mail and webhook",
    )
    one.add_argument(
        "--trend", action="store_true", help="loss, accuracy, time and text of all complete nights, also as a page"
    )
    parser.add_argument(
        "--date", default=None, help="with --check: the night, such as 2026-11-21 (today, by the clock here)"
    )


def run(args: argparse.Namespace) -> int:
    """List or check. Raises `UserError`."""
    settings = load()
    directory = directories.NightDirs(settings).path
    if args.check:
        date = datetime.date.today() if args.date is None else directories.date_of(args.date)
        state = states.state_of(directory, date)
        line = _line(date, state)
        if state.status in ("complete", "rejected", "running"):
            print(line)
            return 0
        if state.status == "missing":
            other, who = states.running(directory)
            if other is not None and states.state_of(directory, other).status == "running":
                line += f"; night {other} is still running ({who})"
        log(f"error: {line}")
        notify.by_all(
            settings, f"Luigi: Nightly {date} is {state.status}", line, event="check", status=state.status, date=date
        )
        return 1
    if args.date is not None:
        raise UserError("--date is for --check; without it all nights are listed")
    if args.trend:
        print(records.trend_text(directory))
        if records.by_date(directory):
            print(f"page: {records.write_trend(directory)}")
        return 0
    dates = sorted(states.dates(directory), reverse=True)
    if not dates:
        print(f"no night in {directory} yet")
    for date in dates[:_SHOWN]:
        print(_line(date, states.state_of(directory, date)))
    return 0


def _line(date: datetime.date, state: NightState) -> str:
    """`night 2026-11-21: failed: … (started …)`, in local time, like the night's date."""
    said = {
        "missing": "missing: it was never started",
        "killed": f"killed before it could say why, process {state.pid} on {state.host}; its log may tell",
    }.get(state.status, state.status)
    started = f" (started {local_time(state.started)})" if state.started else ""
    return f"night {date}: {said}{': ' if state.line else ''}{state.line}{started}"
