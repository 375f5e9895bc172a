"""A check for free disk space before anything is written."""

from __future__ import annotations

import shutil
from pathlib import Path

from common.errors import DiskError, existing_parent


def require_disk_space(directory: Path, needed: int, what: str) -> None:
    """Raise `DiskError` unless `needed` bytes are free on the disk of `directory`. `what` begins the message, such as
    "the shards need"."""
    free = shutil.disk_usage(existing_parent(directory)).free
    if needed > free:
        raise DiskError(
            f"{what} {needed:,} bytes in {directory}; {free:,} are free there; make space, or use another disk"
        )
