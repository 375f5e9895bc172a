"""Lets a stage run at once although luigid believes that a worker that is gone still runs it.

`luigi.scheduler.Scheduler.add_task` ignores a task that another worker runs, and the new run ends with
`already_running`. Only `Scheduler.prune`, every 60 s, marks a worker's tasks as failed once that worker has been silent
for [scheduler] worker_disconnect_delay (60 s). An interrupted run, however, may be restarted at once; a stage's lock
shows that nobody works on it.
"""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Any

import luigi
from luigi.interface import core
from luigi.rpc import RemoteScheduler, RPCError

from common.console import log
from pipeline.luigi_adapters.luigid_progress import has_audience
from stages.directory.lock import is_held


def release(task: luigi.Task, directory: Path) -> None:
    """Report `task` as failed to luigid if it is listed as running and nobody holds the lock of `directory`."""
    worker = _workers().pop(task.task_id, None) if has_audience() else None
    if worker is None:
        return
    if is_held(directory):
        log(f"{directory} is being made by luigi worker {worker}, according to luigid; wait for it, or stop it first")
        return
    with contextlib.suppress(RPCError):  # luigi reports it itself
        _scheduler().add_task(worker=worker, task_id=task.task_id, status="FAILED", expl="its worker is gone")


@functools.cache
def _workers() -> dict[str, str]:
    """The workers of the tasks that were running when this process began to schedule, by task id."""
    try:
        running = _scheduler().task_list(status="RUNNING", upstream_status="")
    except RPCError:  # luigi reports it itself
        return {}
    return {task_id: task["worker_running"] for task_id, task in running.items() if isinstance(task, dict)}


@functools.cache
def _scheduler() -> Any:  # its methods are made at run time
    """Connected as in `luigi.interface._schedule_and_run`."""
    settings = core()
    return RemoteScheduler(settings.scheduler_url or f"http://{settings.scheduler_host}:{settings.scheduler_port}/")
