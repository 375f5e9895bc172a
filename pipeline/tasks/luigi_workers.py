"""Several luigi workers (`luigi --workers 2`): luigi forks a process for each task then.

A signal to luigi reaches all of them, none outlives it, and luigi ends with the status that it has with one worker.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

import luigi
from luigi.retcodes import retcode
from luigi.worker import TaskProcess

from common.errors import EXIT_INTERRUPTED
from common.process import die_with_parent, is_ignored

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Leave(KeyboardInterrupt, SystemExit):
    """Leaves luigi at once with an exit code. Luigi hands a KeyboardInterrupt on, and makes a failed task with a
    traceback of everything else; being a SystemExit too, it ends the process with `code`."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = self.status = code


@contextlib.contextmanager
def leaving() -> Iterator[None]:
    """Around a task's `run`: `Leave` ends luigi, also from a process that luigi has forked for the task."""
    try:
        yield
    except Leave as leave:
        if multiprocessing.parent_process() is None:
            raise
        # Not as an exception: luigi would report a failed task before its main process sees the exit status.
        _exit(leave.status)


def install() -> None:
    """Have stop signals to luigi's main process reach the processes of its tasks. Without any, the default action."""
    if threading.current_thread() is threading.main_thread():
        for signum in _SIGNALS:
            if not is_ignored(signum):
                signal.signal(signum, _on_signal)


def _on_signal(signum: int, frame: FrameType | None) -> None:
    if _task_processes():
        _stop_all(EXIT_INTERRUPTED)
    elif signum == signal.SIGINT:
        signal.default_int_handler(signum, frame)
    else:
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)


def _task_processes() -> list[multiprocessing.process.BaseProcess]:
    return [process for process in multiprocessing.active_children() if isinstance(process, TaskProcess)]


def _stop_all(status: int) -> None:
    """Have the tasks save and stop, and end with `status`. A second signal meanwhile is handed on, too."""
    processes = _task_processes()
    for process in processes:
        assert process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)
    for process in processes:
        process.join()
    _exit(status)


def _exit(status: int) -> None:
    """Luigi turns exceptions in its callbacks into log lines, so end without one."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)


@luigi.Task.event_handler(luigi.Event.START)  # type: ignore[untyped-decorator]
def _begin(task: luigi.Task) -> None:
    """In a task's process: only luigi's main process answers to the terminal, whose signals reach both."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        for signum in (signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with_parent(parent.pid)


@luigi.Task.event_handler(luigi.Event.PROCESS_FAILURE)  # type: ignore[untyped-decorator]
def _leave_as_the_task_did(task: luigi.Task, error: str) -> None:
    """In the main process: a task's process has ended with a status; `error` ends with it."""
    status = int(error.split()[-1])
    if status in (EXIT_INTERRUPTED, retcode().already_running, retcode().scheduling_error):
        _stop_all(status)
