"""Free space, asked for before anything is written."""

from __future__ import annotations

import shutil
from pathlib import Path

from trainer.errors import UserError


def require_room(directory: Path, needed: int, what: str) -> None:
    """Raise `UserError` unless `needed` bytes are free in `directory`; `what` needs them ("the shards need")."""
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise UserError(
            f"{what} {needed:,} bytes in {directory}; {free:,} are free there; make space, or use another disk"
        )
