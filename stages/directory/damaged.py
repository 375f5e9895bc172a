"""What is kept of a stage that was complete and was damaged since."""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path
from typing import Any

from common.console import log
from common.files import disk_errors
from stages.directory.records import MANIFEST, is_inside, read_manifest, why_altered

#: The manifest while the damaged files are removed.
DAMAGED = "damaged.json"
#: Reading more than this is announced: it takes seconds.
_LARGE_BYTES = 1 << 30


def remove_damaged(path: Path) -> None:
    """Remove the manifest and the outputs that are not, or no longer, what it says.

    Raises `DiskError`, before anything is removed if a file cannot be looked at: it may be whole.
    """
    name = MANIFEST if (path / MANIFEST).exists() else DAMAGED
    recorded = (read_manifest(path, name) or {}).get("outputs", ())
    outputs = [(path / one["path"], one) for one in recorded if is_inside(one["path"])]
    for file, _ in outputs:
        with disk_errors(file), contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            file.open("rb").close()
    with disk_errors(path / MANIFEST), contextlib.suppress(FileNotFoundError):
        (path / MANIFEST).replace(path / DAMAGED)  # other machines must not see it, however long the rest takes
    total = sum(one["bytes"] for _, one in outputs)
    if total > _LARGE_BYTES:
        log(f"{path} is damaged: reading its {len(outputs)} files, {total / 1e9:.1f} GB, to keep the whole ones")
    for file, one in outputs:
        if not _is_whole(file, one):
            with disk_errors(file), contextlib.suppress(FileNotFoundError, NotADirectoryError):
                file.unlink()
    with disk_errors(path / DAMAGED):
        (path / DAMAGED).unlink(missing_ok=True)


def _is_whole(file: Path, output: dict[str, Any]) -> bool:
    """Raises `DiskError`."""
    with disk_errors(file):
        try:
            return why_altered(file, output, verify=True) is None
        except OSError as error:
            if error.errno == errno.EIO:  # a bad sector
                return False
            raise
