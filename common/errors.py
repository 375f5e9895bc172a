"""The project's exceptions and exit statuses.

Exception
├── Interrupted          asked to stop; the same command resumes: exit 75
└── UserError            bad input: one line, exit 1, no traceback
    ├── DiskError        a write failed (full disk, I/O error, no permission)
    ├── LockHeld         another process is at work on the same directory
    │   └── LeaseLost    another machine has taken this one's turn to make a stage: exit 73
    ├── NodeMissing      a machine did not join the run: exit 69
    ├── CheckpointError  a checkpoint cannot be used
    └── AgreedError      all workers raise it together; the root reports it
        ├── NonFiniteStep    training has diverged
        └── ReplicasDiffer   copies of the weights differ between workers: exit 71

A UserError's message is one line that says what was seen, what is allowed and what to do; secrets are redacted.
Programming errors are asserts and other exceptions, with tracebacks.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterable
from pathlib import Path

from common.secrets import redact

#: Exit status of a run that was asked to stop, saved its state and can be resumed (EX_TEMPFAIL of sysexits.h).
EXIT_INTERRUPTED = 75
#: Exit status when a machine did not join the run (EX_UNAVAILABLE of sysexits.h).
EXIT_NODE_MISSING = 69
#: Exit status when workers' copies of the weights differ (EX_OSERR of sysexits.h): a restart may succeed.
EXIT_REPLICAS = 71
#: Exit status of a command whose turn another machine has taken (EX_CANTCREAT of sysexits.h).
EXIT_LEASE_LOST = 73
#: Exit status of an unexpected exception (EX_SOFTWARE of sysexits.h).
EXIT_SOFTWARE = 70
#: Exit status of a command that refuses its input.
EXIT_USER_ERROR = 1


class Interrupted(Exception):
    """This process was asked to stop; the same command resumes."""


class UserError(Exception):
    """An error that the user can correct."""

    #: Exit status of a command that ends with this error.
    exit_status = EXIT_USER_ERROR

    def __init__(self, *args: object) -> None:
        super().__init__(*(redact(arg) if isinstance(arg, str) else arg for arg in args))


class LockHeld(UserError):
    """Another process is at work on the same directory."""


class LeaseLost(LockHeld):
    """Another machine has taken this one's turn to make a stage."""

    exit_status = EXIT_LEASE_LOST


class NodeMissing(UserError):
    """A machine did not join the run in time."""

    exit_status = EXIT_NODE_MISSING


class CheckpointError(UserError):
    """A checkpoint is damaged, incomplete or belongs to something else."""


class AgreedError(UserError):
    """An error that all workers raise at the same time, so that the root alone reports it."""


class NonFiniteStep(AgreedError):
    """A step's loss or gradient norm, or the weights after it, are not finite."""

    def __init__(self, message: str, *, step: int = -1) -> None:
        super().__init__(message)
        #: Number of the step in its phase, from 0; -1 in the error that ends a run.
        self.step = step


class ReplicasDiffer(AgreedError):
    """Workers differ in weights or moments that they should hold alike."""

    exit_status = EXIT_REPLICAS


class DiskError(UserError):
    """A file could not be written; its previous content is intact."""

    @classmethod
    def of(cls, error: OSError, path: Path) -> DiskError:
        """One line for a failed write to `path`: the system's words, the path, and the free space if it matters."""
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(existing_parent(path)).free
            return cls(
                f"cannot write {path}: {reason} ({free / 1e6:.1f} MB free there); make space and run the same again"
            )
        return cls(f"cannot write {path}: {reason}; check the path and its permissions, then run the same again")


def one_line(error: Exception) -> str:
    """A library's error message on one line and without secrets, for use in one of our messages."""
    return redact(" ".join(str(error).split())) or type(error).__name__


def suggestion(name: str, known: Iterable[str]) -> str:
    """For an unknown `name`: the nearest known one, or a list of them all."""
    import difflib

    names = list(known)
    lowered = {one.lower(): one for one in names}
    near = difflib.get_close_matches(name.lower(), lowered, n=1)
    return f"did you mean {lowered[near[0]]}?" if near else f"allowed: {', '.join(names)}"


def existing_parent(path: Path) -> Path:
    """`path` itself or its nearest ancestor that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def unreadable(error: OSError) -> str:
    """A line for people about a file that could not be read."""
    said = error.strerror or str(error)
    return f"cannot read {error.filename}: {said}; check its permissions" if error.filename else said
