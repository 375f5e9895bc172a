"""`python -m pipeline cancel STAGE`: ends the job that runs a stage on Slurm or Kubernetes."""

from __future__ import annotations

import argparse
import contextlib
import time

from common.console import log
from common.errors import LockHeld, UserError
from pipeline.commands.why import add_task, find
from pipeline.launchers import find_job
from pipeline.launchers.jobs import Unreachable
from pipeline.status.stage_dirs import StageDirs
from pipeline.tasks.stage import Stage
from stages.directory.lock import hold

SUMMARY = "cancel a stage's job on Slurm or Kubernetes; what it has saved is kept"
#: Seconds to wait for the end of a job: Slurm kills its processes after KillWait, 30 s by default.
_END_S = 120


def add_options(parser: argparse.ArgumentParser) -> None:
    add_task(parser)


def run(args: argparse.Namespace) -> int:
    """0 when the job has ended. Raises `UserError` if there is none."""
    task = find(args.task, args.phase)
    if not isinstance(task, Stage):
        raise UserError(f"{args.task} is several stages; give one of them, as `python -m pipeline status` names it")
    job = find_job(task.directory)
    if job is None:
        others = [
            stage_dir.path
            for stage_dir in StageDirs(task.settings.work_dir).others(task.label, task.identity.fingerprint)
            if find_job(stage_dir.path)
        ]
        elsewhere = f"; {others[0]}, made with other settings, has one: give those settings" if others else ""
        raise UserError(f"no job is running in {task.directory}{elsewhere}")
    try:
        job.cancel()
        deadline = time.monotonic() + _END_S
        while job.is_alive():
            if time.monotonic() > deadline:
                raise UserError(f"{job} was cancelled, but is still there after {_END_S} s; check its scheduler")
            time.sleep(0.5)
    except Unreachable as error:
        raise UserError(f"{job} could not be cancelled: {error}") from None
    with contextlib.suppress(LockHeld), hold(task.directory, knows_jobs=True):  # else the waiting luigi does it
        job.forget()
    log(f"{task.label}: {job} was cancelled; the same run resumes from what it has saved")
    return 0
