"""The lock of a stage directory, which also respects a job on other machines."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.errors import LockHeld
from common.files import read_json
from common.lock import LOCK, is_held
from common.lock import hold as hold_directory

__all__ = ["JOB", "LOCK", "hold", "is_held", "read_job"]

#: The job submitted for the stage (`pipeline.launchers`), until its end has been handled.
JOB = "job.json"


def read_job(directory: Path) -> dict[str, Any] | None:
    """The record of the job of a stage directory; empty if it is damaged; None if there is none."""
    return read_json(directory / JOB, damaged={})


@contextlib.contextmanager
def hold(directory: Path, *, knows_jobs: bool = False) -> Iterator[int]:
    """`common.lock.hold` for a stage's directory. Raises `LockHeld`, which names the holder; `DiskError`.

    A job on other machines may be filling the directory although no process waits for it. Then only a caller that
    handles jobs (`knows_jobs`) gets the lock.
    """
    with hold_directory(directory) as fd:
        job = None if knows_jobs else read_job(directory)
        if job == {}:
            raise LockHeld(f"{directory / JOB} is damaged: a job on other machines may be at work in {directory}")
        if job is not None:
            raise LockHeld(
                f"{directory} is being made by {job.get('launcher')} job {job.get('id') or job.get('name')}, as far as "
                f"is known; `luigi` waits for it, `python -m pipeline cancel` ends it"
            )
        yield fd
