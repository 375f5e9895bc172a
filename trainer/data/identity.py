"""What tells a data set from any other: the sha256 of each of its files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from common.files import has_types, read_json
from common.hashing import InputHashes, readable

#: The cache.
CACHE = "data_identity.json"
#: What is read of a file in a stage's manifest; another tool's manifest.json may have any content.
_OUTPUT = {"path": str, "bytes": int, "sha256": str}


def content_identity(directory: Path, names: Sequence[str], cache: Path) -> str:
    """`content:` and the sha256, in hex, of the names and contents of the files `names` in `directory`.

    A file's hash is taken from its stage's manifest if the file has the size recorded there and was there, unchanged,
    when that was written; else it is computed, and cached in the directory `cache`. Raises `UserError`.
    """
    known = _recorded(directory, names)
    unknown = [name for name in names if name not in known]
    hashed = InputHashes(cache / CACHE).hash(directory / name for name in unknown)
    known |= {name: file.sha256 for name, file in zip(unknown, hashed, strict=True)}
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
            path = directory / output["path"]
            with readable(path):
                stat = path.stat()
            if stat.st_size == output["bytes"] and stat.st_ctime_ns <= written:
                found[output["path"]] = output["sha256"]
    return found
