"""Signals and exit statuses with several luigi workers (`luigi --workers 2`).

`luigi.worker.Worker._run_task` then forks a process for each task, which a SIGTERM to luigi does not reach and which
outlives luigi; and `luigi.worker.Worker._purge_children` turns every exit status into a failed task. With this module a
signal to luigi reaches each task once, no task outlives luigi, and luigi ends with the status it has with one worker.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from types import FrameType

import luigi
from luigi.retcodes import retcode
from luigi.worker import TaskProcess

from common.errors import EXIT_INTERRUPTED
from common.process import USER_STOP_SIGNALS, die_with_parent, is_ignored
from pipeline.luigi_adapters.exits import exit_now, interrupt


def install() -> None:
    """Pass stop signals from luigi's main process on to its task processes. Without any, take the default action."""
    if sys.platform == "linux":  # where Python 3.14 no longer forks unless told to, which luigi relies on
        multiprocessing.set_start_method("fork", force=True)
    if threading.current_thread() is threading.main_thread():
        for signum in USER_STOP_SIGNALS:
            if not is_ignored(signum):
                signal.signal(signum, _on_signal)


def _on_signal(signum: int, frame: FrameType | None) -> None:
    if _task_processes():
        _stop_all(EXIT_INTERRUPTED)
    elif signum == signal.SIGINT:
        interrupt()
    else:
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)


def _task_processes() -> list[multiprocessing.process.BaseProcess]:
    return [process for process in multiprocessing.active_children() if isinstance(process, TaskProcess)]


def _stop_all(status: int) -> None:
    """Have all tasks save and stop, then exit with `status`. A second signal meanwhile is passed on, too."""
    processes = _task_processes()
    for process in processes:
        assert process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)
    for process in processes:
        process.join()
    exit_now(status)


@luigi.Task.event_handler(luigi.Event.START)  # type: ignore[untyped-decorator]
def _begin(task: luigi.Task) -> None:
    """In a task process: leave the terminal's signals, which reach both processes, to luigi's main process."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        for signum in (signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with_parent(parent.pid)


@luigi.Task.event_handler(luigi.Event.PROCESS_FAILURE)  # type: ignore[untyped-decorator]
def _exit_as_the_task_did(task: luigi.Task, error: str) -> None:
    """In the main process, when a task process has ended with a status; `error` ends with that status."""
    status = int(error.split()[-1])
    if status in (EXIT_INTERRUPTED, retcode().already_running, retcode().scheduling_error):
        _stop_all(status)
