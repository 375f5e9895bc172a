"""Which checkpoints a directory holds, and which of them are whole. Imports no torch: the pipeline asks, too.

checkpoints/
  ckpt_<global step>/             of the branch that training is on
  abandoned-<n>/ckpt_<…>/         what training went on without: set aside, and never resumed from, counted or pruned
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
#: The directory of checkpoints in a training's.
CHECKPOINTS = "checkpoints"
_NAME = re.compile(r"ckpt_(\d+)")
_ABANDONED = re.compile(r"abandoned-(\d+)")


class Unreadable(str):
    """Why a checkpoint cannot be read now: an I/O error, no permission. It may be whole all the same."""


def encode_manifest(step: int, files: list[dict[str, Any]]) -> bytes:
    """The bytes of a checkpoint's manifest; they contain a sha256 of their own content."""
    content = {"format": "native", "version": FORMAT_VERSION, "step": step, "files": files}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**content, "sha256": digest}, indent=2) + "\n").encode()


def why_invalid(directory: Path, *, verify: bool | Callable[[str], bool] = True) -> str | None:
    """Why `directory` is not a whole checkpoint, or None if it is.

    `verify`: whether every byte is read and checked, or of which files; of the others only the sizes are compared.
    What cannot be read at all is an `Unreadable`.
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
    """Why a checkpoint's file is not the one that its `entry` in the manifest describes."""
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


def checkpoint_step(path: Path) -> int | None:
    """The global step in the name of a checkpoint; None: it is not named like one."""
    match = _NAME.fullmatch(path.name)
    return None if match is None else int(match[1])


def checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """(global step, path) of everything in `directory` that is named like a checkpoint, newest first."""
    try:
        entries = list(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(((step, path) for path in entries if (step := checkpoint_step(path)) is not None), reverse=True)


def whole_checkpoints(directory: Path) -> Iterator[tuple[int, Path]]:
    """(global step, path) of those that are whole by their manifest and sizes, newest first."""
    return ((step, path) for step, path in checkpoints(directory) if why_invalid(path, verify=False) is None)


def set_aside(directory: Path, paths: Iterable[Path], records: Path) -> Path | None:
    """Move the checkpoints `paths` of `directory`, newest first, to where nobody takes them for its own, with a copy of
    the file `records`, if there is one; returns the place, None if there was nothing to move. Raises `DiskError`.

    Newest first: whenever this is cut short, the newest that is left is one that was to be left behind, or the one to
    go on from.
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
    """The places in `directory` that hold what was set aside, in the order of their numbers."""
    try:
        entries = list(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = {int(match[1]): path for path in entries if (match := _ABANDONED.fullmatch(path.name))}
    return [found[number] for number in sorted(found)]
