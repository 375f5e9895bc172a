"""The address of a work directory's TensorBoard."""

from __future__ import annotations

from pathlib import Path

from common.files import read_json
from pipeline.status.stage_dirs import holder

#: In the work directory: links to curves, the address, and the lock of the running TensorBoard.
DIRECTORY, ADDRESS = "tensorboard", "address.json"


def address(work_dir: Path) -> str | None:
    """The URL of the TensorBoard of `work_dir`; None: it is not running."""
    if holder(work_dir / DIRECTORY) is None:
        return None
    return (read_json(work_dir / DIRECTORY / ADDRESS) or {}).get("url")
