"""The identity of external files."""

from __future__ import annotations

import functools
from pathlib import Path

from common.hashing import INPUT_HASHES, InputHashes


@functools.cache
def input_hashes(work_dir: Path) -> InputHashes:
    """The sha256 of external files, cached in the work directory."""
    return InputHashes(work_dir / INPUT_HASHES)
