"""`python -m pipeline runs`: a line for each training that the work directory and the store hold, newest first."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
from collections.abc import Sequence
from pathlib import Path

from common.console import log
from common.errors import UserError
from pipeline.settings.load import load
from pipeline.settings.sections import Settings
from pipeline.status.runs import HeldRun, differing, held_runs, matching
from pipeline.status.stage_dirs import StageDirs
from pipeline.status.stored import stored_dirs
from pipeline.store.shared import SharedStore
from pipeline.tasks.nights.directories import NightDirs
from stages.view.text import columns, number, percent, size

SUMMARY = "a line for each training run, here and in the store: when, how far, held-out loss, size, and what differs"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="for programs: a list with one object for each, with all settings"
    )
    parser.add_argument(
        "--where", action="append", default=[], metavar="SETTING=VALUE",
        help="only those with this setting, such as Phase1-lr=5e-4; repeatable: all must match",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Raises `UserError`."""
    settings = load()
    conditions = dict(map(_condition, args.where))
    shared = SharedStore.of(settings.store)
    places = str(settings.work_dir) + (f" and {shared.backend.url}" if shared else "")
    found = matching(_held(settings, shared), conditions)
    if args.json:
        print(json.dumps([one.to_json() for one in found], indent=2))
    elif found:
        print(table(found, has_store=shared is not None))
    elif conditions:
        print(f"there is no training run with {' '.join(args.where)} in {places}")
    else:
        print(f"there is no training run in {places}; start one with `luigi --module pipeline BertPhase2`")
    return 0


def _held(settings: Settings, shared: SharedStore | None) -> list[HeldRun]:
    """Those of the work directory, of its nights, which have their directory in their name, and of the store; newest
    first."""
    places = [StageDirs(path) for path in (settings.work_dir, *NightDirs(settings).others(datetime.date.min))]
    _note_unreadable([path for place in places for path in place.unreadable])
    stored = set[str]()
    if shared is not None:
        from stages.store.maintenance import read_records

        contents = read_records(shared.backend)
        stored = {one.record.fingerprint for one in contents.stages}
        stored |= {one.fingerprint for one in contents.trainings if one.lease.checkpoints}
        here = {one.fingerprint for place in places for one in place.all}
        places[0] = StageDirs(settings.work_dir, stored_dirs(shared.backend, contents, here))
    top, *nights = places
    found = held_runs(top, stored)
    for night in nights:
        name = night.work_dir.relative_to(settings.work_dir.absolute())
        found += [dataclasses.replace(one, name=f"{name}/{one.name}") for one in held_runs(night, stored)]
    return sorted(found, key=lambda run: run.when, reverse=True)


def _note_unreadable(paths: Sequence[Path]) -> None:
    if paths:
        log(f"note: {len(paths)} stage director{'ies' if len(paths) > 1 else 'y'} cannot be read and may hold more: "
            f"{paths[0]}{', …' if len(paths) > 1 else ''}")  # fmt: skip


def _condition(text: str) -> tuple[str, str]:
    name, mark, value = text.partition("=")
    if not (name and mark):
        raise UserError(f"--where {text} is not allowed; allowed: SETTING=VALUE, such as Phase1-lr=5e-4")
    return name.removeprefix("--"), value.strip()


def table(runs: Sequence[HeldRun], *, has_store: bool) -> str:
    """A line for each run; the settings that differ come last, as luigi takes them."""
    names = differing(runs)
    head = ["run", "when", "state", "steps", "loss", "accuracy", "size", *(["where"] if has_store else []), "settings"]
    rows = [head]
    for one in runs:
        where = ["here, store" if one.here and one.stored else "here" if one.here else "store"] if has_store else []
        rows.append(
            [
                one.name,
                datetime.datetime.fromtimestamp(one.when).strftime("%Y-%m-%d %H:%M"),
                one.state,
                " + ".join(map(str, one.steps)),
                number(one.loss),
                "–" if one.accuracy is None else percent(one.accuracy),
                size(one.bytes),
                *where,
                " ".join(f"{name}={one.settings[name]}" for name in names if name in one.settings),
            ]
        )
    return "\n".join(columns(rows))
