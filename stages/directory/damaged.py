"""What is kept of a stage that was complete and was damaged since."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from common.console import print_line
from common.files import disk_errors
from stages.directory.records import MANIFEST, read_manifest, why_altered

#: The manifest while the damaged files are removed.
DAMAGED = "damaged.json"
#: Reading more than this is announced: it takes seconds.
_LARGE_BYTES = 1 << 30


def remove_damaged(path: Path) -> None:
    """Remove the manifest and the outputs that are not, or no longer, what it says. Raises `DiskError`."""
    with disk_errors(path / MANIFEST):
        if (path / MANIFEST).exists():  # other machines must not see it, however long this takes
            (path / MANIFEST).replace(path / DAMAGED)
        outputs = (read_manifest(path, DAMAGED) or {}).get("outputs", ())
    total = sum(output["bytes"] for output in outputs)
    if total > _LARGE_BYTES:
        print_line(f"{path} is damaged: reading its {len(outputs)} files, {total / 1e9:.1f} GB, to keep the whole ones")
    for output in outputs:
        file = path / output["path"]
        if not os.path.normpath(file).startswith(f"{os.path.normpath(path)}{os.sep}") or "\0" in output["path"]:
            continue
        try:
            is_whole = why_altered(file, output, verify=True) is None
        except OSError:  # a bad sector, for example
            is_whole = False
        if not is_whole:
            with disk_errors(file), contextlib.suppress(FileNotFoundError, NotADirectoryError):
                file.unlink()
    with disk_errors(path / DAMAGED):
        (path / DAMAGED).unlink(missing_ok=True)
