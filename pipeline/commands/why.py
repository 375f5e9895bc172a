"""`python -m pipeline why TASK`: why it would run, or that it is complete."""

from __future__ import annotations

import argparse
from typing import Any

from common.errors import UserError, suggestion
from common.files import utc
from pipeline.status.chain import StageTask, chain, is_complete, would_run
from pipeline.status.differences import cause
from pipeline.status.extension import continues_from, stored_checkpoint
from pipeline.status.stage_dirs import StageDirs, holder, last_checkpoint_step
from pipeline.tasks.everything import TASKS
from pipeline.tasks.goal import Goal
from pipeline.tasks.stage import Stage
from stages.directory.attempts import last_failure
from stages.directory.manifest import IDENTITY, MANIFEST, why_incomplete

SUMMARY = "why a task would run: which setting, input or file; exit status 0 if it is complete, 1 if it would run"


def explain(task: StageTask, stage_dirs: StageDirs, *, verify: bool) -> str | None:
    """Why `task` is not complete, in one line, or None if it is. With `verify` all its outputs are read."""
    directory, fingerprint = task.directory, task.identity.fingerprint
    reason = why_incomplete(directory, fingerprint, verify=verify)
    if reason is None:
        return None
    who = holder(directory)
    if who is not None:
        return f"{task.label} is running: {who}, since {who.started or '?'}"
    if verify and why_incomplete(directory, fingerprint) is None:
        return (
            f"{task.label} is damaged: {reason}; a run checks sizes only, "
            f"so remove that file and run the same again to remake it"
        )
    if (directory / MANIFEST).exists():
        return f"{task.label} would run: {reason}"
    failure = last_failure(directory)
    if failure is not None:
        return f"{task.label} would run again: it failed at {utc(failure.at)}: {failure.line}"
    if (directory / IDENTITY).exists():
        step, of = last_checkpoint_step(directory), "" if task.max_steps is None else f" of {task.max_steps}"
        origin = stored_checkpoint(task) or (None if step is None else f"step {step}{of}")
        return f"{task.label} would run: it was interrupted" + (f", and resumes from {origin}" if origin else "")
    if task.stored is not None:
        return f"{task.label} would be fetched: it is in the store"
    reason, origin = cause(task, stage_dirs), continues_from(task, stage_dirs)
    here, start = (" here", f"; it would continue from {origin}") if origin else ("", "")
    if reason is not None:
        return f"{task.label} would run: {reason}{start}"
    missing = [upstream.label for upstream in task.requires().values() if not is_complete(upstream)]
    after = f"; {', '.join(missing)} would run first" if missing else ""
    return f"{task.label} would run: it was never started{here}{start}{after}"


def find(name: str, phase: int | None) -> Goal | Stage:
    """The task called `name`: a class (`Pretrain`, with its phase), or a stage as `status` writes it
    (`pretrain-phase1`). Raises `UserError` with the names there are."""
    stem, _, suffix = name.partition("-phase")
    if suffix.isdigit():
        phase = int(suffix)
    classes = {cls.__name__.lower(): cls for cls in TASKS}
    cls = classes.get(stem.replace("_", "").lower())
    if cls is None or (suffix and not suffix.isdigit()):
        raise UserError(f"there is no task {name}; {suggestion(stem, [cls.__name__ for cls in TASKS])}")
    if not _has_phase(cls):
        if phase is not None:
            raise UserError(f"{cls.__name__} has no phase; leave it out")
        return cls()
    if phase not in (1, 2):
        raise UserError(f"{cls.__name__} has a phase; allowed: --phase 1, --phase 2")
    parameters: dict[str, Any] = {"phase": phase}
    return cls(**parameters)


def _has_phase(cls: type[Goal] | type[Stage]) -> bool:
    return hasattr(cls, "phase")


def add_task(parser: argparse.ArgumentParser, *, default: str | None = None) -> None:
    """What `find` needs; with a `default` the task may be left out."""
    task = "a task (Pretrain, BertPhase2), or a stage of `status`"
    optional: dict[str, Any] = {} if default is None else {"nargs": "?", "default": default}
    parser.add_argument("task", metavar="TASK", help=f"{task} (default: {default})" if default else task, **optional)
    parser.add_argument("--phase", type=int, help="1 or 2, for tasks that have a phase")


def add_options(parser: argparse.ArgumentParser) -> None:
    add_task(parser)
    parser.add_argument("--verify", action="store_true", help="read every output and compare its sha256, too")


def run(args: argparse.Namespace) -> int:
    """Print one line for the stage, or for each stage that the goal would run."""
    task = find(args.task, args.phase)
    if isinstance(task, Stage):
        stage_dirs = StageDirs(task.settings.work_dir)
        reason = explain(task, stage_dirs, verify=args.verify)
        print(reason or f"{task.label} is complete: {task.directory}")
        return 0 if reason is None else 1
    stages = chain(task) if args.verify else would_run(task)
    stage_dirs = StageDirs(chain(task)[0].settings.work_dir)
    reasons = [reason for stage in stages if (reason := explain(stage, stage_dirs, verify=args.verify)) is not None]
    print("\n".join(reasons) or f"{type(task).__name__} is complete")
    return 1 if reasons else 0
