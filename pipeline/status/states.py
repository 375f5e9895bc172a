"""The present state of each stage."""

from __future__ import annotations

import dataclasses
import time
from typing import Literal

from common.console import clock
from common.errors import UserError
from common.files import METRICS, parse_utc, utc
from pipeline.status.chain import ChainGoal, StageTask, chain, is_complete, would_run
from pipeline.status.differences import cause
from pipeline.status.extension import continues_from, extended_from, stored_checkpoint
from pipeline.status.stage_dirs import StageDirs, abandoned_checkpoints, holder, last_checkpoint_step, size_bytes
from stages.directory.attempts import last_failure, last_sign_of_life
from stages.directory.manifest import IDENTITY, MANIFEST
from stages.directory.records import read_progress
from stages.view.curves import MetricsFile
from stages.view.goodput import goodput_of
from stages.view.status import StageStatus
from stages.view.text import size

#: What each means is in docs/recovery.md.
State = Literal["complete", "running", "interrupted", "failed", "damaged", "stale", "waiting", "refused"]


def statuses(goal: ChainGoal) -> list[StageStatus]:
    """The state of every stage of `goal` in running order."""
    needed = {task.label for task in would_run(goal)}
    tasks = chain(goal)
    stage_dirs = StageDirs(tasks[0].settings.work_dir)
    return [_status(task, stage_dirs, needed=task.label in needed) for task in tasks]


def _status(task: StageTask, stage_dirs: StageDirs, *, needed: bool) -> StageStatus:
    status = StageStatus(task.label, type(task).__name__, getattr(task, "phase", None), "waiting")
    try:
        fingerprint = task.identity.fingerprint
    except UserError as error:
        upstream = [up.label for up in task.requires().values() if not _has_identity(up)]
        if upstream:
            return dataclasses.replace(status, detail=f"for {upstream[0]}")
        return dataclasses.replace(status, state="refused", detail=str(error))
    there = dataclasses.replace(status, directory=task.directory, fingerprint=fingerprint)
    for ask in (_complete, _running, _failed, _damaged, _interrupted):
        found = ask(task, there)
        if found is not None:
            return _with_history(task, found)
    stale = any(stage_dir.is_complete for stage_dir in stage_dirs.others(task.label, fingerprint))
    if stale:
        details = [f"made with other settings: {cause(task, stage_dirs)}"]
    else:
        missing = [up.label for up in task.requires().values() if not is_complete(up)]
        details = [f"for {', '.join(missing)}"] if missing else ["its turn is next"]
    if task.stored is not None:
        details = [*(details if stale else []), "in the store"]
    elif needed and (origin := continues_from(task, stage_dirs)) is not None:
        details.append(f"would continue from {origin}")
    if not needed:
        details = [*(details if stale else []), "not needed: all that is made from it is complete"]
    return dataclasses.replace(
        status, state="stale" if stale else "waiting", detail="; ".join(details), fingerprint=fingerprint
    )


def _has_identity(task: StageTask) -> bool:
    try:
        return bool(task.identity)
    except UserError:
        return False


def _complete(task: StageTask, status: StageStatus) -> StageStatus | None:
    # A training that has reached a rung is complete as far as it goes, and has no manifest.
    if task.why_incomplete() is not None or not (task.directory / MANIFEST).exists():
        return None
    manifest = task.manifest()
    return dataclasses.replace(status, state="complete", when=manifest["started"], seconds=manifest["seconds"])


def _running(task: StageTask, status: StageStatus) -> StageStatus | None:
    who = holder(task.directory)
    if who is None:
        return None
    status = _with_progress(task, status)
    per_s = status.per_s
    left_s = (
        (status.total - status.done) / per_s if per_s and status.total is not None and status.done is not None else None
    )
    by = who.job or f"on {who.host}, process {who.pid or '?'}"
    details = [by, *(_how_far(status) or filter(None, [read_progress(task.directory).get("label")]))]
    if per_s and left_s is not None:
        rate = f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"
        details += [f"{rate} {status.unit}/s", f"{clock(left_s)} left"]
    return dataclasses.replace(
        status, state="running", detail=", ".join(details), when=who.started, seconds=_seconds_since(who.started),
        left_s=None if left_s is None else round(left_s, 1), host=who.host, pid=who.pid,
    )  # fmt: skip


def _failed(task: StageTask, status: StageStatus) -> StageStatus | None:
    failure = last_failure(task.directory)
    if failure is None:
        return None
    return dataclasses.replace(_with_progress(task, status), state="failed", detail=failure.line, when=utc(failure.at))


def _damaged(task: StageTask, status: StageStatus) -> StageStatus | None:
    if not (task.directory / MANIFEST).exists():
        return None
    return dataclasses.replace(status, state="damaged", detail=task.why_incomplete() or "")


def _interrupted(task: StageTask, status: StageStatus) -> StageStatus | None:
    if not (task.directory / IDENTITY).exists():
        return None
    status = _with_progress(task, status)
    details, saved = _how_far(status), last_checkpoint_step(task.directory)
    if task.resumes:
        origin = stored_checkpoint(task) or (None if saved is None else f"step {saved}")
        details.append(f"resumes from {origin}" if origin else "no checkpoint yet")
    when = last_sign_of_life(task.directory) or (task.directory / IDENTITY).stat().st_mtime
    return dataclasses.replace(
        status,
        state="interrupted",
        detail=", ".join(details) or "resumes with what is still missing",
        when=utc(when),
    )


def _with_history(task: StageTask, status: StageStatus) -> StageStatus:
    """`status` with the training that this one continued from, and checkpoints it has set aside, which take space."""
    details, places = [status.detail], abandoned_checkpoints(task.directory)
    if task.resumes and status.state != "complete":  # the report has that of a complete one
        details.append(str(goodput_of(task.directory, status.attempts, MetricsFile(task.directory / METRICS).read())))
    if (origin := extended_from(task.directory)) is not None:
        details.append(f"continued from {origin}")
    if places:
        names = [path.name for place in places for path in sorted(place.glob("ckpt_*"))]
        freed = size(sum(map(size_bytes, places)))
        details.append(f"set aside: {', '.join(names) or places[0].name}, {freed} (clean --remove)")
    return dataclasses.replace(status, detail="; ".join(filter(None, details)))


def _with_progress(task: StageTask, status: StageStatus) -> StageStatus:
    """`status` with the values of progress.json; for a training without one, with its newest checkpoint."""
    progress = read_progress(task.directory)
    if progress:
        done, total, unit, per_s = (progress.get(name) for name in ("done", "total", "unit", "per_s"))
        return dataclasses.replace(status, done=done, total=total, unit=unit, per_s=per_s)
    step = last_checkpoint_step(task.directory)
    return status if step is None else dataclasses.replace(status, done=step, total=task.max_steps, unit="steps")


def _how_far(status: StageStatus) -> list[str]:
    if status.done is None:
        return []
    total = "" if status.total is None else f" of {status.total:,}"
    return [f"at {status.done:,}{total} {status.unit}"]


def _seconds_since(when: str | None) -> float | None:
    """Seconds since a time that `common.files.utc` wrote."""
    if when is None:
        return None
    return max(0.0, round(time.time() - parse_utc(when).timestamp(), 1))
