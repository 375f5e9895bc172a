"""What tells a data set from any other: the sha256 of each of its files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.files import disk_errors, has_types, read_json, replace_json, sha256_of

#: Remembered hashes, by path: [size, mtime in ns, ctime in ns, inode, sha256].
CACHE = "data_identity.json"
#: Seconds: a file written more recently than this might still change without a new time stamp.
_SETTLED_S = 2.0
#: Hashing more data than this is announced: it takes seconds.
_LARGE_BYTES = 1 << 30
#: What is read of a file in a stage's manifest; another tool's manifest.json may have any content.
_OUTPUT = {"path": str, "bytes": int, "sha256": str}


def content_identity(directory: Path, names: Sequence[str], cache: Path, log: Callable[[str], None]) -> str:
    """`content:` and the sha256, in hex, of the names and contents of the files `names` in `directory`.

    A file's hash is taken from its stage's manifest if the file has the size recorded there and was there, unchanged,
    when that was written; else it is computed, and cached in the directory `cache`. Raises `UserError`.
    """
    known = _recorded(directory, names)
    remembered = read_json(cache / CACHE) or {}
    stamps = {name: _stamp(directory / name) for name in names if name not in known}
    for name, stamp in stamps.items():
        entry = remembered.get(str((directory / name).absolute()))
        if isinstance(entry, list) and entry[:-1] == stamp:
            known[name] = entry[-1]
    unknown = [name for name in names if name not in known]
    if unknown:
        size = sum(stamps[name][0] for name in unknown)
        if size > _LARGE_BYTES:
            log(f"reading {len(unknown)} files, {size / 1e9:.1f} GB, of {directory} once, to know this data set again")
        known |= _hashed(directory, unknown, stamps)
        _remember(cache, directory, {name: [*stamps[name], known[name]] for name in unknown}, remembered)
    record = [[name, known[name]] for name in names]
    return "content:" + hashlib.sha256(json.dumps(record).encode()).hexdigest()


def _recorded(directory: Path, names: Sequence[str]) -> dict[str, str]:
    """sha256 by name from the directory's manifest, for files that are still as it describes them.

    What is moved or copied over a file may keep an older modification time, but never the time of its last change.
    """
    manifest = directory / "manifest.json"
    record = read_json(manifest)
    if record is None:
        return {}
    written, outputs = manifest.stat().st_mtime_ns, record.get("outputs")
    wanted, found = set(names), {}
    for output in outputs if isinstance(outputs, list) else ():
        if has_types(output, _OUTPUT) and output["path"] in wanted:
            size, _, changed, _ = _stamp(directory / output["path"])
            if size == output["bytes"] and changed <= written:
                found[output["path"]] = output["sha256"]
    return found


def _stamp(path: Path) -> list[int]:
    """Size, mtime, ctime and inode. Raises `UserError`."""
    with _readable(path):
        stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; fetch or make this file again") from error


def _hashed(directory: Path, names: list[str], stamps: dict[str, list[int]]) -> dict[str, str]:
    def digest(name: str) -> str:
        path = directory / name
        with _readable(path):
            found = sha256_of(path)
        if _stamp(path) != stamps[name]:
            raise UserError(f"{path} was changed while it was read; wait until the data set is complete")
        return found

    with ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="identity") as pool:
        return dict(zip(names, pool.map(digest, names), strict=True))


def _remember(cache: Path, directory: Path, entries: dict[str, list[Any]], remembered: dict[str, Any]) -> None:
    now = time.time_ns()
    entries = {
        str((directory / name).absolute()): entry
        for name, entry in entries.items()
        if abs(now - entry[2]) > _SETTLED_S * 1e9  # a file server's clock may be ahead
    }
    with disk_errors(cache / CACHE):
        cache.mkdir(parents=True, exist_ok=True)
        replace_json(cache / CACHE, {**remembered, **entries})
