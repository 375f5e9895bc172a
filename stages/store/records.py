"""What the store records about a complete stage, and the keys under which everything is kept.

    stages/<label>/<fingerprint>.json     `StageRecord`, written once, after its files
    objects/<aa>/<sha256>                 files of complete stages
    leases/<label>-<fingerprint>.json      who is making a stage, and the checkpoints of a training run (`lease`)
    checkpoints/<label>-<fingerprint>/<token>/<sha256>   their files, by the lease under which they were pushed

Records are sealed: each holds the sha256 of its own content, so that damage is noticed. Files are named by their
sha256. A store contains no pickle.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from stages.directory.records import is_inside

STAGES, OBJECTS, LEASES, CHECKPOINTS = "stages", "objects", "leases", "checkpoints"
#: Small objects that are written to see whether writing works, then removed.
PROBES = "probe"
#: Announcements of those who remove files.
REMOVALS = "removals"
#: The first part of every key. Others may keep files beside them.
PREFIXES = (STAGES, OBJECTS, LEASES, CHECKPOINTS, PROBES, REMOVALS)
#: Files beside a training run's checkpoints with which a resume on another machine continues.
RESUMED_RECORDS = (
    *("metrics.jsonl", "attempts.jsonl", "train_time.json", "budget.json", "extended_from.json"),
    "trackers.json",  # the tracker's run continues on another machine
)
_FORMAT = 1
_SHA256 = re.compile("[0-9a-f]{64}")


class Damaged(Exception):
    """A record of the store is not what was written."""


@dataclass(frozen=True)
class StoredFile:
    """A file: path relative to the stage directory (or to the checkpoint), size in bytes, sha256 in hex."""

    path: str
    bytes: int
    sha256: str

    @property
    def key(self) -> str:
        """The key of a file of a complete stage."""
        return f"{OBJECTS}/{self.sha256[:2]}/{self.sha256}"

    @classmethod
    def of_record(cls, record: Any) -> StoredFile:
        """Raises `Damaged`."""
        try:
            file = cls(str(record["path"]), int(record["bytes"]), str(record["sha256"]))
        except (KeyError, TypeError, ValueError):
            raise Damaged("it has no list of files") from None
        if not _SHA256.fullmatch(file.sha256) or file.bytes < 0:
            raise Damaged(f"{file.path} has no sha256 or size")
        return file


@dataclass(frozen=True)
class StageRecord:
    """A complete stage."""

    label: str
    fingerprint: str
    #: In the order in which they are fetched: the manifest is the last.
    files: tuple[StoredFile, ...]
    #: When it was pushed (UTC) and from which host, for people.
    pushed: str
    host: str

    @property
    def total_bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @property
    def key(self) -> str:
        return stage_key(self.label, self.fingerprint)

    @property
    def beside(self) -> set[str]:
        """Names of the directories beside its own into which it puts files."""
        paths = (PurePosixPath(file.path).parts for file in self.files)
        return {parts[1] for parts in paths if parts[:1] == ("..",) and len(parts) > 1}

    def encode(self) -> bytes:
        return seal(dataclasses.asdict(self))

    @classmethod
    def decode(cls, data: bytes, label: str, fingerprint: str) -> StageRecord:
        """Raises `Damaged`, including for the record of another stage."""
        content = unseal(data)
        if (content.get("label"), content.get("fingerprint")) != (label, fingerprint):
            raise Damaged(f"it belongs to {content.get('label')} {str(content.get('fingerprint'))[:10]}")
        listed = content.get("files")
        if not isinstance(listed, list) or not listed:
            raise Damaged("it has no list of files")
        files = tuple(map(StoredFile.of_record, listed))
        return cls(label, fingerprint, files, str(content.get("pushed")), str(content.get("host")))


def is_ours(key: str) -> bool:
    return key.partition("/")[0] in PREFIXES


def full_name(label: str, fingerprint: str) -> str:
    """A stage's name in keys."""
    return f"{label}-{fingerprint}"


def stage_key(label: str, fingerprint: str) -> str:
    return f"{STAGES}/{label}/{fingerprint}.json"


def stage_of_key(key: str) -> tuple[str, str] | None:
    """Label and fingerprint of a `stage_key`; None for other keys."""
    found = re.fullmatch(rf"{STAGES}/([a-z0-9_-]+)/([0-9a-f]{{64}})\.json", key)
    return (found[1], found[2]) if found else None


def require_inside(files: Iterable[StoredFile], siblings: Collection[str] = ()) -> None:
    """Raise `Damaged` unless each path stays in its directory, or in one of the directories `siblings` beside it."""
    for file in files:
        path, parts = file.path, PurePosixPath(file.path).parts
        if parts[:1] == ("..",) and len(parts) > 2 and parts[1] in siblings:
            path = "/".join(parts[2:])
        if not is_inside(path):
            raise Damaged(f"it has a file {file.path!r}, which would be outside its directory")


def seal(content: dict[str, Any]) -> bytes:
    """JSON with the sha256 of its content."""
    content = {"format": _FORMAT, **content}
    return (json.dumps({"content": content, "sha256": _digest(content)}, indent=1) + "\n").encode()


def unseal(data: bytes) -> dict[str, Any]:
    """The content. Raises `Damaged`."""
    try:
        record = json.loads(data)
        content: dict[str, Any] = record["content"]
        intact = isinstance(content, dict) and record["sha256"] == _digest(content)
    except (ValueError, KeyError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise Damaged("its sha256 is not that of its content")
    if content.get("format") != _FORMAT:
        raise Damaged(f"its format is {content.get('format')}, this version reads {_FORMAT}")
    return content


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
