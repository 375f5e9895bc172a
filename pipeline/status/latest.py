"""WORK/latest/<stage>[-phase<N>]: links to the newest complete directory of each stage."""

from __future__ import annotations

import os
from pathlib import Path

from common.errors import DiskError
from common.files import failpoint
from stages.directory.manifest import MANIFEST

LATEST = "latest"


def is_older(work_dir: Path, label: str, directory: Path) -> bool:
    """Whether the link is older than the complete `directory`, or not there."""
    try:
        linked = (work_dir / LATEST / label / MANIFEST).stat().st_mtime_ns
    except FileNotFoundError:
        return True
    return (directory / MANIFEST).stat().st_mtime_ns > linked


def link(work_dir: Path, label: str, directory: Path) -> None:
    """Have the link point to `directory`, in one step. Raises `DiskError`."""
    latest = work_dir / LATEST
    final, temporary = latest / label, latest / f".{label}.{os.getpid()}"
    try:
        latest.mkdir(exist_ok=True)
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(Path("..") / directory.name)
        failpoint(f"link-before:{label}")
        temporary.replace(final)
        failpoint(f"link-after:{label}")
    except OSError as error:
        raise DiskError.of(error, final) from error
