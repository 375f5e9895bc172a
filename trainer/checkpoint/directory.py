"""Find and validate the checkpoints of a directory. Imports no torch, as the pipeline uses it too.

checkpoints/
  ckpt_<global step>/             of the current branch of the training
  abandoned-<n>/ckpt_<…>/         of an abandoned branch; never resumed from, counted or pruned
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from common.files import disk_errors, failpoint, fsync_directory, sha256_of

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
#: Name of the checkpoint directory in a training's output directory.
CHECKPOINTS = "checkpoints"
_NAME = re.compile(r"ckpt_(\d+)")
_ABANDONED = re.compile(r"abandoned-(\d+)")


class Unreadable(str):
    """Why a checkpoint cannot be read now (I/O error, permissions); it may still be valid."""


def encode_manifest(step: int, files: list[dict[str, Any]]) -> bytes:
    """Encode a checkpoint's manifest, including a sha256 of its own content."""
    content = {"format": "native", "version": FORMAT_VERSION, "step": step, "files": files}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**content, "sha256": digest}, indent=2) + "\n").encode()


def why_invalid(directory: Path, *, verify: bool | Callable[[str], bool] = True) -> str | None:
    """Why `directory` is not a valid checkpoint; None if it is.

    `verify`: whether to check the sha256 of all files, or a predicate that selects files; for the others only the size
    is compared. Returns an `Unreadable` for an I/O error.
    """
    try:
        raw = (directory / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return f"it has no {MANIFEST}: it was never finished"
    except OSError as error:
        return Unreadable(f"its {MANIFEST} cannot be read: {error.strerror}")
    try:
        manifest = json.loads(raw)
        intact = raw == encode_manifest(manifest["step"], manifest["files"])
    except (ValueError, KeyError, TypeError, RecursionError):
        intact = False
    if not intact:
        return f"its {MANIFEST} is damaged"
    for entry in manifest["files"]:
        wanted = verify if isinstance(verify, bool) else verify(entry["path"])
        reason = _why_altered(directory / entry["path"], entry, verify=wanted)
        if reason is not None:
            return reason
    return None


def _why_altered(path: Path, entry: dict[str, Any], *, verify: bool) -> str | None:
    """Why a file does not match its manifest entry; None if it does."""
    try:
        size = path.stat().st_size
        digest = sha256_of(path) if verify and size == entry["bytes"] else entry["sha256"]
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return f"{path.name} is missing"
    except OSError as error:
        return Unreadable(f"{path.name} cannot be read: {error.strerror}")
    if size != entry["bytes"]:
        return f"{path.name} has {size} bytes instead of {entry['bytes']}"
    return None if digest == entry["sha256"] else f"{path.name} is damaged: its sha256 is not the manifest's"


def checkpoint_path(directory: Path, step: int) -> Path:
    """Where `directory` has the checkpoint of a global step."""
    return directory / f"ckpt_{step}"


def checkpoint_step(path: Path) -> int | None:
    """The global step in a checkpoint's name; None for any other name."""
    match = _NAME.fullmatch(path.name)
    return None if match is None else int(match[1])


def checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """(global step, path) of every entry of `directory` with a checkpoint's name, newest first."""
    try:
        entries = list(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(((step, path) for path in entries if (step := checkpoint_step(path)) is not None), reverse=True)


def whole_checkpoints(directory: Path) -> Iterator[tuple[int, Path]]:
    """(global step, path) of checkpoints that are valid by manifest and file sizes, newest first."""
    return ((step, path) for step, path in checkpoints(directory) if why_invalid(path, verify=False) is None)


def set_aside(directory: Path, paths: Iterable[Path], records: Path) -> Path | None:
    """Move the checkpoints `paths` (newest first) to a new abandoned-<n>/, with a copy of the file `records` if it
    exists.

    Returns the new directory, or None without `paths`. Raises `DiskError`. The order matters: if it is interrupted, the
    newest checkpoint left is either one still to be moved or the one to resume from.
    """
    paths = list(paths)
    if not paths:
        return None
    number = 1
    while (place := directory / f"abandoned-{number}").exists():
        number += 1
    with disk_errors(place):
        place.mkdir()
        if records.exists():
            shutil.copyfile(records, place / records.name)
    fsync_directory(directory)
    for path in paths:
        failpoint(f"set-aside-before:{path.name}")
        with disk_errors(path):
            path.rename(place / path.name)
        failpoint(f"set-aside-after:{path.name}")
        fsync_directory(place)
        fsync_directory(directory)
    return place


def abandoned(directory: Path) -> list[Path]:
    """The abandoned-<n>/ directories, in numerical order."""
    try:
        entries = list(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = {int(match[1]): path for path in entries if (match := _ABANDONED.fullmatch(path.name))}
    return [found[number] for number in sorted(found)]
