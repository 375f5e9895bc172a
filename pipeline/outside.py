"""The identity of files that come from outside."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from trainer.errors import UserError
from trainer.files import read_json, replace_json, sha256_of


def file_identity(work_dir: Path, path: Path) -> str:
    """The sha256 of an outside file, remembered in WORK/inputs.json for as long as its size and times stay.

    Raises `UserError` if there is no such file.
    """
    try:
        stat = path.stat()
        key, seen = str(path.absolute()), [stat.st_size, stat.st_mtime_ns, stat.st_ino]
        memory_path = work_dir / "inputs.json"
        memory = read_json(memory_path) or {}
        if memory.get(key, {}).get("seen") != seen:
            memory[key] = {"seen": seen, "sha256": sha256_of(path)}
            _remember(memory_path, memory)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check the path in luigi.cfg") from error
    digest: str = memory[key]["sha256"]
    return digest


def _remember(path: Path, memory: dict[str, Any]) -> None:
    """Only a memory: several processes may write it, and where it cannot be written files are hashed again."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_json(path, memory)
