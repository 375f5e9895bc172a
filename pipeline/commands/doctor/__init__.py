"""`python -m pipeline doctor`: whether a run with these settings can finish unattended, how long it would take, and how
much disk it needs."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from common.errors import UserError
from common.secrets import redact
from pipeline.commands.doctor.finding import Check, Finding, Plan
from pipeline.commands.why import add_task, find
from pipeline.settings.load import load
from pipeline.settings.origin import placed
from pipeline.status.stage_dirs import StageDirs
from pipeline.tasks.nights.directories import NightDirs, date_of, names_date, overlay_of
from stages.view.text import duration, size

if TYPE_CHECKING:
    from pipeline.commands.doctor.estimates import Estimate

SUMMARY = "check that a run can finish unattended (machine, disk, network, store, scheduler); its time and disk"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_task(parser, default="BertPhase2")
    parser.add_argument("--date", help="check the nightly run of this date, such as 2026-11-21")
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")
    parser.add_argument(
        "--measure", action="store_true", help="first run it all with few steps and little text, to measure its rates"
    )


def run(args: argparse.Namespace) -> int:
    """Print a line for each check, and one for each stage to make; returns 1 if there is a problem."""
    plan, found = _plan(args), list[Finding]()
    plan.stages()  # raises `UserError` for settings from which no chain can be built

    def log(finding: Finding) -> None:
        found.append(finding)
        if not args.json:
            print(_line(finding), flush=True)

    for finding in _examine(plan):
        log(finding)
    estimates = _estimates(plan, measures=args.measure, is_sound=not _problems(found), log=log)
    wrong = _problems(found)
    if args.json:
        records = {"checks": found, "stages": estimates}
        said = {name: [dataclasses.asdict(one) for one in records[name]] for name in records}  # type: ignore[call-overload]
        print(json.dumps({**said, "problems": wrong}, indent=2))
    else:
        print(*_table(estimates, is_measured=args.measure), sep="\n")
        print(f"{wrong} problem{'s' if wrong > 1 else ''} to fix first" if wrong else "no problem was found")
    return 1 if wrong else 0


def _plan(args: argparse.Namespace) -> Plan:
    """The run that the arguments name; with a date, that night's. Raises `UserError`."""
    task, settings = find(args.task, args.phase), load()
    if args.date is None:
        if names_date(settings):
            raise UserError("these settings have a placeholder for the date; give a night's date: --date 2026-11-21")
        return Plan(task, [settings.work_dir])
    nights, date = NightDirs(settings), date_of(args.date)
    nights.require_startable(date)
    overlay = overlay_of(settings, date)
    overlay.setdefault("run", {})["work_dir"] = str(nights.directory(date))
    phase = {"phase": task.phase} if hasattr(task, "phase") else {}
    return Plan(type(task)(overlay=overlay, **phase), [nights.directory(date), *nights.others(date)])


def _examine(plan: Plan) -> Iterator[Finding]:
    """All checks except the disk's, which needs the estimates. Those that ask servers come before the clock's."""
    from pipeline.commands.doctor import cluster, machine, network, places

    checks: tuple[Check, ...] = (
        *(machine.packages, machine.device, machine.shared_memory, places.work_directory),
        *(network.store, network.credentials, places.text, places.vocabulary, network.addresses, network.trackers),
        *(network.clock, cluster.scheduler, cluster.ports),
    )
    for check in checks:
        try:
            for found in check(plan):
                text = found.text if found.level == "ok" else placed(found.text)
                yield dataclasses.replace(found, text=redact(text))
        except UserError as error:
            yield Finding(check.__name__.replace("_", " "), "problem", placed(str(error)))


def _estimates(plan: Plan, *, measures: bool, is_sound: bool, log: Callable[[Finding], None]) -> Sequence[Estimate]:
    """For the stages to make, from what is in the work directory and, if `measures`, from a short run."""
    from pipeline.commands.doctor.disk import disk
    from pipeline.commands.doctor.estimates import Estimates
    from pipeline.commands.doctor.measure import measured

    work_dirs = [StageDirs(path) for path in plan.work_dirs]
    if measures and not is_sound:
        log(Finding("short run", "warning", "skipped, as it would meet the problems above"))
    with contextlib.ExitStack() as stack:
        if measures and is_sound:
            try:
                work_dirs.insert(0, stack.enter_context(measured(plan)))
            except UserError as error:
                log(Finding("short run", "problem", str(error)))
        estimates = Estimates(plan, work_dirs).all()
    log(disk(plan, estimates))
    return estimates


def _problems(found: Sequence[Finding]) -> int:
    return sum(finding.level == "problem" for finding in found)


def _line(finding: Finding) -> str:
    return f"{finding.level:8} {finding.check:14} {finding.text}"


def _table(estimates: Sequence[Estimate], *, is_measured: bool) -> Iterator[str]:
    """The stages to make, with their time, disk space and the source of both."""
    if not estimates:
        yield "nothing to make: everything is complete"
        return
    yield f"\n{'still to be made':24} {'time':>12} {'disk':>9}"
    for one in estimates:
        yield f"{one.stage:24} {_or_unknown(one.seconds, duration):>12} {_or_unknown(one.bytes, size):>9}  {one.source}"
    seconds = [one.seconds for one in estimates if one.seconds is not None]
    needed = [one.bytes for one in estimates if one.bytes is not None]
    time = f"{_at_least(seconds, estimates)}{duration(sum(seconds))}" if seconds else "unknown time"
    yield f"total: {time}, {_at_least(needed, estimates)}{size(sum(needed))} of disk"
    if len(seconds) < len(estimates) and not is_measured:
        yield "unknown: python -m pipeline doctor --measure finds out with a short run"


def _at_least(known: Sequence[float], every: Sequence[Estimate]) -> str:
    return "at least " if len(known) < len(every) else ""


def _or_unknown(value: float | None, shown: Callable[[float], str]) -> str:
    return "unknown" if value is None else shown(value)
