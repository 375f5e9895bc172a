"""`python -m pipeline store`: what the shared store holds; verify it, prune it, or see what a run would move."""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Callable
from typing import TYPE_CHECKING

from common.console import log
from common.duration import Duration
from common.errors import UserError
from common.size import parse_size
from pipeline.settings.load import load
from pipeline.status.chain import chain, is_complete, would_run
from pipeline.status.extension import stored_checkpoint
from pipeline.store.shared import SharedStore
from pipeline.store.transfer import transfer_bar
from pipeline.tasks.everything import Everything
from pipeline.tasks.stage import Stage
from stages.directory.lock import hold
from stages.view.text import columns, size

if TYPE_CHECKING:
    from stages.store.maintenance import Contents

SUMMARY = "what the shared store ([store] url) holds; verify, prune, or what a run would fetch and push"


def add_options(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", metavar="list|plan|push|verify|prune")
    verbs.add_parser("list", help="complete stages and checkpoints (the default)")
    verbs.add_parser("plan", help="what a run with these settings would fetch, make and push")
    verbs.add_parser("push", help="push what is complete here but not there, even if it was pushed before and removed")
    verify = verbs.add_parser("verify", help="compare what is there with its records; exit status 1 if it differs")
    verify.add_argument("--read", action="store_true", help="read every file and compare its sha256, too")
    verify.add_argument("--remove", action="store_true", help="remove what is damaged")
    prune = verbs.add_parser("prune", help="what is old or too much; removes it only with --remove")
    prune.add_argument(
        "--older-than", type=_parsed(Duration.parse), metavar="TIME",
        help="what is older than TIME, such as 30d or 12h: stages, and checkpoints of idle training runs",
    )  # fmt: skip
    prune.add_argument(
        "--max-size",
        type=_parsed(parse_size),
        metavar="SIZE",
        help="the oldest stages, until the rest fit SIZE, such as 500G or 2T",
    )
    prune.add_argument("--keep", type=_count, metavar="N", help="of each stage, all but the N pushed last")
    prune.add_argument("--remove", action="store_true", help="remove them, and files that nothing refers to")


def run(args: argparse.Namespace) -> int:
    """Raises `UserError`."""
    shared = SharedStore.of(load().store)
    if shared is None:
        raise UserError("[store] url is empty: there is no store; give one, e.g. --Store-url s3://bucket/prefix")
    verbs = {None: _list, "list": _list, "plan": _plan, "push": _push, "verify": _verify, "prune": _prune}
    return verbs[args.verb](shared, args)


def _list(shared: SharedStore, args: argparse.Namespace) -> int:
    from stages.store import maintenance

    contents = maintenance.read(shared.backend)
    complete = {(stage.record.label, stage.record.fingerprint) for stage in contents.stages}
    rows = [("stage", "files", "size", "pushed (UTC)", "from")]
    for stage in contents.stages:
        record = stage.record
        rows.append((stage.name, f"{len(record.files):,}", size(record.total_bytes), record.pushed, record.host))
    for training in contents.trainings:
        lease = training.lease
        is_begun = lease.checkpoints or lease.holder is not None
        if is_begun and (training.label, training.fingerprint) not in complete:
            newest = lease.checkpoints[-1] if lease.checkpoints else None
            moved = size(sum(file.bytes for file in newest.files)) if newest else ""
            who = str(lease.holder) if lease.holder else "nobody is making it now"
            rows.append((training.name, newest.name if newest else "", moved, "not complete", who))
    print("\n".join(columns(rows)))
    listed = sum(stage.record.total_bytes for stage in contents.stages)
    print(f"{shared.backend.url}: {size(contents.total_bytes)} in {len(contents.files):,} files, "
          f"for {size(listed)} of complete stages")  # fmt: skip
    for key, why in contents.damaged.items():
        print(f"damaged: {key}: {why}")
    return 0


def _plan(shared: SharedStore, args: argparse.Namespace) -> int:
    needed = {task.label for task in would_run(Everything())}
    for task in chain(Everything()):
        assert isinstance(task, Stage)
        stage = task.shared
        pushed = "pushed" if shared.pushes(stage) else "not pushed"
        if is_complete(task):
            is_gone = shared.pushes(stage) and shared.has_pushed(stage)
            missing = f"; not in the store{' any more (store push)' if is_gone else f': {pushed}'}"
            said = "complete here" + (missing if shared.pulls(stage) and shared.find(stage) is None else "")
        elif task.label not in needed:
            said = "not needed"
        elif (record := shared.find(stage)) is not None:
            said = f"fetched: {size(record.total_bytes)} in {len(record.files):,} files"
        else:
            origin = stored_checkpoint(task)
            said = f"made here{f' from {origin}' if origin else ''}; {pushed}"
        print(f"{task.label:24} {said}")
    return 0


def _push(shared: SharedStore, args: argparse.Namespace) -> int:
    from stages.store.checkpoints import conclude
    from stages.store.complete import find_stage, push_stage

    for task in chain(Everything()):
        assert isinstance(task, Stage)
        stage = task.shared
        if not (shared.pushes(stage) and is_complete(task)):
            continue
        if find_stage(shared.backend, stage.label, stage.fingerprint) is None:
            with hold(stage.directory), transfer_bar(f"push {task.label}") as bar:
                record = push_stage(shared.backend, stage.directory, stage.label, bar.update, bar.reset)
                conclude(shared.backend, stage.directory, stage.label, stage.fingerprint)
            print(f"{task.label:24} {len(record.files):,} files, {size(record.total_bytes)}")
    return 0


def _verify(shared: SharedStore, args: argparse.Namespace) -> int:
    from stages.store import maintenance

    contents = maintenance.read(shared.backend)
    if not (contents.stages or contents.trainings or contents.files or contents.damaged):
        raise UserError(f"there is nothing in {shared.backend.url}; check [store] url, or push something first")
    if args.read:
        with transfer_bar("verify", contents.referenced_bytes) as bar:
            wrong = maintenance.verify(shared.backend, contents, read_all=True, report=bar.update)
    else:
        wrong = maintenance.verify(shared.backend, contents, read_all=False)
    for key, why in sorted(wrong.items()):
        print(f"{key}: {why}")
    files = f"{len(contents.files):,} files, {size(contents.total_bytes)}"
    if not wrong:
        print(f"{shared.backend.url} is intact: {files}{'' if args.read else ' (sizes only; --read compares bytes)'}")
        return 0
    if args.remove:
        names = maintenance.remove_damaged(shared.backend, contents, wrong)
        print(f"removed, with the records of {', '.join(names) or 'no complete stage'}")
        print("whoever has them can restore them with: python -m pipeline store push")
    return 1


def _prune(shared: SharedStore, args: argparse.Namespace) -> int:
    from stages.store import maintenance

    contents = maintenance.read(shared.backend)
    now = maintenance.now_of(shared.backend)
    gone = maintenance.superfluous(
        contents, older_than_s=args.older_than, most_bytes=args.max_size, newest=args.keep, now=now
    )
    for one in gone:
        what = "checkpoints, last worked on" if isinstance(one, maintenance.StoredTraining) else "pushed"
        total = sum(file.bytes for file in one.files().values())
        print(f"{one.name}: {size(total)}, {what} {_ago(now - one.written)} ago")
    freed = sum(entry.bytes for entry in maintenance.unreferenced(maintenance.without(contents, gone), gone, now))
    if args.remove:
        freed = maintenance.remove(shared.backend, contents, gone, now)
        log(f"removed {len(gone)}: {size(freed)} freed")
    else:
        log(f"{len(gone)} could be removed: {size(freed)}; --remove does it")
    _note_damaged(contents)
    return 0


def _note_damaged(contents: Contents) -> None:
    if count := len(contents.damaged):
        log(f"note: {count} damaged record{'s' if count > 1 else ''}; see python -m pipeline store verify")


def _ago(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))


def _parsed(parse: Callable[[str], int]) -> Callable[[str], int]:
    """`parse` for argparse, which shows the text of this kind of error only."""

    def parsed(text: str) -> int:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def _count(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text} is not allowed; allowed: a whole number, 1 or more")
    return int(text)
