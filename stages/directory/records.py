"""Reads the records of a stage directory; what a crash or a person left invalid counts as missing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from common.files import PROGRESS, has_types, parse_utc, read_json, sha256_of
from common.lock import IDENTITY
from trainer.data.file_names import HELD_OUT_SHARDS

MANIFEST = "manifest.json"
#: Describes the tokens of a corpus for people.
DATA_CARD = "DATACARD.md"

_IDENTITY: dict[str, Any] = {
    "stage": str, "format_version": int, "parameters": dict, "inputs": dict, "upstream": dict, "fingerprint": str,
}  # fmt: skip
_MANIFEST: dict[str, Any] = {**_IDENTITY, "outputs": list, "counts": dict, "started": str, "seconds": (int, float)}
_OUTPUT: dict[str, Any] = {"path": str, "bytes": int, "sha256": str}


def read_identity(directory: Path) -> dict[str, Any] | None:
    """stage.json, or None if it is missing or invalid."""
    record = read_json(directory / IDENTITY)
    return record if has_types(record, _IDENTITY) else None


def read_manifest(directory: Path, name: str = MANIFEST) -> dict[str, Any] | None:
    """manifest.json, or None if it is missing or invalid."""
    record = read_json(directory / name)
    if record is None or not has_types(record, _MANIFEST) or not _is_time(record["started"]):
        return None
    present, versions = record.get("present", []), record.get("versions", {})
    is_whole = isinstance(present, list) and all(isinstance(name, str) for name in present)
    is_whole &= isinstance(versions, dict) and all(isinstance(version, str) for version in versions.values())
    return record if is_whole and all(has_types(output, _OUTPUT) for output in record["outputs"]) else None


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """With the values of inner objects among the others: {"model": {"layers": 2}} → {"model.layers": 2}."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= {f"{key}.{inner}": v for inner, v in value.items()} if isinstance(value, dict) else {key: value}
    return found


def flat_texts(values: Mapping[str, Any]) -> dict[str, str]:
    """`flat`, as text for people: None is ""."""
    return {key: "" if value is None else str(value) for key, value in flat(values).items()}


def is_inside(path: str) -> bool:
    """Whether a relative path of a record stays in its directory, and a file can have it."""
    parts = PurePosixPath(path).parts
    return bool(parts) and not path.startswith("/") and "\0" not in path and ".." not in parts


def why_altered(path: Path, output: dict[str, Any], *, verify: bool) -> str | None:
    """Why an output is not the file in the manifest, or None."""
    try:
        stat = path.stat()
    except (OSError, ValueError):  # ValueError: no file can have such a name
        return f"{path} is missing"
    if stat.st_size != output["bytes"]:
        return f"{path} has {stat.st_size} bytes, its manifest says {output['bytes']}"
    if output.get("mtime_ns", stat.st_mtime_ns) != stat.st_mtime_ns:
        return f"{path} was altered: it is a hard link to a file that was edited since"
    if verify and (not path.is_file() or sha256_of(path) != output["sha256"]):
        return f"{path} was altered: its sha256 is not the manifest's"
    return None


def read_progress(directory: Path) -> dict[str, Any]:
    """progress.json; {} if it is missing or invalid."""
    record = read_json(directory / PROGRESS) or {}
    numbers = all(isinstance(record.get(name), (int, float, type(None))) for name in ("done", "total", "per_s"))
    return record if numbers and isinstance(record.get("unit"), (str, type(None))) else {}


def _is_time(value: Any) -> bool:
    try:
        parse_utc(value)
    except (TypeError, ValueError):
        return False
    return True


def held_out_shards(record: Mapping[str, Any], dataset: Mapping[str, Any]) -> dict[str, str]:
    """The sha256 of the shards that an evaluation read, by name. `record`, `dataset`: what the evaluation and its data
    set recorded; {} of a data set that is gone makes {} of those that were its."""
    given = record.get("inputs", {}).get("held_out")
    if isinstance(given, dict):
        return {name: str(sha256) for name, sha256 in given.items()}
    outputs = dataset.get("outputs", ())
    return {one["path"]: one["sha256"] for one in outputs if Path(one["path"]).match(HELD_OUT_SHARDS)}
