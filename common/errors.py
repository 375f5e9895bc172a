"""The exceptions of this project, as a tree.

Exception
├── Interrupted        the process was asked to stop; the same command resumes: exit 75
└── UserError          bad input: one line, exit 1, no traceback
    ├── DiskError      a write failed (full disk, I/O error, no permission)
    ├── LockHeld       somebody else is making the same thing
    ├── NodeMissing    a machine of the run did not come
    ├── CheckpointError  a checkpoint that cannot be used
    └── AgreedError    what all workers of a run have found together: one of them says it
        ├── NonFiniteStep     training has diverged
        └── ReplicasDiffer    workers that hold the same weights have come to hold others; exit 71

A UserError's message says what was seen, what is allowed and what to do, in one line, and holds no secret.
Mistakes of the programmer are asserts and other exceptions, with their tracebacks.
"""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from common.secrets import redact

#: Exit status of a run that was asked to stop, saved its state and can go on (EX_TEMPFAIL of sysexits.h).
EXIT_INTERRUPTED = 75
#: Exit status when a machine of the run did not come (EX_UNAVAILABLE of sysexits.h).
EXIT_NODE_MISSING = 69
#: Exit status when workers' copies of the weights differ (EX_OSERR of sysexits.h): another start may go well.
EXIT_REPLICAS = 71
#: Exit status of an unexpected exception (EX_SOFTWARE of sysexits.h).
EXIT_SOFTWARE = 70
#: Exit status of a command that was refused because of what it was given.
EXIT_USER_ERROR = 1


class Interrupted(Exception):
    """This process was asked to stop; the same command resumes."""


class UserError(Exception):
    """Something the person who started the command can put right."""

    #: Of a command that it ends.
    exit_status = EXIT_USER_ERROR

    def __init__(self, *args: object) -> None:
        super().__init__(*(redact(arg) if isinstance(arg, str) else arg for arg in args))


class LockHeld(UserError):
    """Another process is at work on the same directory."""


class NodeMissing(UserError):
    """A machine of the run did not come in time."""


class CheckpointError(UserError):
    """A checkpoint is damaged, incomplete or belongs to something else."""


class AgreedError(UserError):
    """What all workers raise at the same time, so that the root says it for all."""


class NonFiniteStep(AgreedError):
    """A step's loss or gradient norm, or the weights after it, are not finite."""

    #: Which batch of the data the step used, from 0; -1: not known yet.
    batch = -1


class ReplicasDiffer(AgreedError):
    """Workers that should hold the same weights do not."""

    exit_status = EXIT_REPLICAS


class DiskError(UserError):
    """A file could not be written; what was there before is untouched."""

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
    """What an exception of a library says, as a part of our line, without secrets."""
    return redact(" ".join(str(error).split())) or type(error).__name__


def existing_parent(path: Path) -> Path:
    """`path` itself or its nearest ancestor that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path
