"""Ends luigi with a status of our choice; all other code raises ordinary exceptions.

Luigi offers no way to do this. The behaviour that this module works around:

* `luigi.worker.TaskProcess.run` turns every exception of `run`, except KeyboardInterrupt, into a failed task.
* `luigi.worker.Worker.add` and `_add` turn every exception of `complete`, except KeyboardInterrupt, into a scheduling
  error, with a traceback in the log and a mail.
* `luigi.retcodes.run_with_retcodes` turns every exception of a task's constructor, except those that are not an
  `Exception`, into `unhandled_exception`, with a traceback. Python then exits with the code of a SystemExit.
* `luigi.worker.TaskProcess.run` reports its result even then. With several workers (`workers`) it runs in a process of
  its own, and the report would be that of a failed task, so that process ends without unwinding.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Iterator
from typing import NoReturn

from luigi import worker
from luigi.retcodes import retcode

from common.console import log
from common.errors import EXIT_INTERRUPTED, Interrupted, LockHeld, UserError, unreadable


class _Exit(KeyboardInterrupt, SystemExit):
    """Passes through luigi as a KeyboardInterrupt and ends the process as a SystemExit."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@contextlib.contextmanager
def while_scheduling() -> Iterator[None]:
    """For a task's constructor and `complete`: a `UserError`, or a file that the user may not read, is one line and
    ends luigi with `scheduling_error`."""
    try:
        yield
        return
    except UserError as error:
        said = str(error)
    except PermissionError as error:
        said = unreadable(error)
    print(f"error: {said}", file=sys.stderr)
    raise _Exit(retcode().scheduling_error)


def interrupt() -> NoReturn:
    """End luigi with `EXIT_INTERRUPTED`, between or within tasks. For signal handlers."""
    with contextlib.suppress(OSError):  # nobody reads it any more
        os.write(2, b"interrupted; the same command continues\n")
    raise _Exit(EXIT_INTERRUPTED)


@contextlib.contextmanager
def while_running() -> Iterator[None]:
    """For a task's `run`: `Interrupted` and `LockHeld` end luigi; luigi itself turns the rest into failed tasks."""
    try:
        yield
        return
    except Interrupted:
        status = EXIT_INTERRUPTED
    except LockHeld as error:
        log(f"error: {error}")
        status = retcode().already_running
    if multiprocessing.parent_process() is not None:
        exit_now(status)
    raise _Exit(status)


def exit_now(status: int) -> NoReturn:
    """End this process without unwinding: luigi's callbacks turn exceptions into log lines."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)


def disable_keep_alive() -> None:
    """End luigi although a task failed. With [worker] keep_alive `luigi.worker.Worker._keep_alive` waits until a failed
    task may be retried or an external one appears; a night's stages have been retried by the night's own luigi."""
    worker.worker().keep_alive = False
