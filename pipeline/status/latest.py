"""WORK/latest/<stage>[-phase<N>]: links to the newest complete directory of each stage."""

from __future__ import annotations

import os
from pathlib import Path

from common.errors import DiskError
from common.files import failpoint
from stages.directory.manifest import MANIFEST

LATEST = "latest"


def is_older(label: str, directory: Path) -> bool:
    """Whether the link of the stage is missing, or older than its complete `directory`."""
    try:
        linked = (directory.parent / LATEST / label / MANIFEST).stat().st_mtime_ns
    except FileNotFoundError:
        return True
    return (directory / MANIFEST).stat().st_mtime_ns > linked


def link(label: str, directory: Path) -> None:
    """Point the link of the stage to `directory`, atomically. Raises `DiskError`."""
    latest = directory.parent / LATEST
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
