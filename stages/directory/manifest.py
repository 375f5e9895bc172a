"""What "complete" means on disk: a stage directory, its identity, its lock and its manifest.

A stage directory DIR holds
    lock            the process that works on it (an advisory lock; see `hold`)
    stage.json      the identity of its result, written first
    progress.json   the progress of a running stage, rewritten about once a second
    alive           touched while a stage that luigi has started computes (see `stages.directory.progress`)
    attempts.jsonl  when it ran, how it ended, and why it failed (see `stages.directory.attempts`)
    …               the outputs
    manifest.json   the identity, the outputs with size and sha256, and the counts; written last

DIR is complete when manifest.json names the expected fingerprint, every output has the size that it lists, and every
file that it lists as present exists, whatever its content. Imports neither torch nor luigi.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from common.errors import UserError
from common.files import (
    ALIVE,
    PROGRESS,
    TEMPORARY_SUFFIX,
    disk_errors,
    fsync_directory,
    parse_utc,
    sha256_of,
    sweep_temporaries,
    utc_now,
    write_json,
)
from common.lock import HELD_FINGERPRINT_VARIABLE, HOLDER, LOCK
from common.lock import IDENTITY as IDENTITY
from stages.directory.attempts import ATTEMPTS
from stages.directory.damaged import DAMAGED, remove_damaged
from stages.directory.lock import hold
from stages.directory.progress import Progress, signs_of_life
from stages.directory.records import MANIFEST as MANIFEST
from stages.directory.records import read_identity, read_manifest, why_altered


def stage_label(stage: str, phase: int | None) -> str:
    """A stage's name, with which its directory's begins: `shard_dataset-phase1`, or `embed_dataset` without phases."""
    return stage if phase is None else f"{stage}-phase{phase}"


def directory_name(label: str, fingerprint: str) -> str:
    """The name of a stage's directory."""
    return f"{label}-{fingerprint[:10]}"


@dataclass(frozen=True)
class Identity:
    """Everything that decides the result of a stage, as JSON types: strings, numbers, booleans, lists, objects."""

    stage: str
    format_version: int
    phase: int | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    #: Identity of external inputs by name: a content hash, a URL, a version.
    inputs: dict[str, Any] = field(default_factory=dict)
    #: Fingerprints of upstream stages by name.
    upstream: dict[str, str] = field(default_factory=dict)

    @functools.cached_property
    def fingerprint(self) -> str:
        """sha256, in hex, of the canonical JSON of all fields."""
        canonical = json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def record(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "fingerprint": self.fingerprint}

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> Self:
        return cls(**{f.name: record[f.name] for f in dataclasses.fields(cls)})


@dataclass(frozen=True)
class Output:
    """A finished file: path relative to the stage directory, size, sha256 in hex."""

    path: str
    bytes: int
    sha256: str
    #: Modification time of a hard link to an external file, which reveals an edit.
    mtime_ns: int | None = None

    def record(self) -> dict[str, Any]:
        return {key: value for key, value in dataclasses.asdict(self).items() if value is not None}

    @classmethod
    def of(cls, directory: Path, path: Path) -> Output:
        """Measure the finished file `path` below `directory` (reads all of it)."""
        return cls(str(path.relative_to(directory)), path.stat().st_size, sha256_of(path))


def why_incomplete(directory: Path, fingerprint: str, *, verify: bool = False) -> str | None:
    """Why `directory` is not the complete stage `fingerprint`, in a few words, or None if it is.

    With `verify` every output's sha256 is checked too, which reads them all.
    """
    manifest = read_manifest(directory)
    if manifest is None and (directory / MANIFEST).exists():
        return f"{directory / MANIFEST} is damaged"
    if manifest is None:
        return "never finished" if directory.exists() else "never started"
    if manifest["fingerprint"] != fingerprint:
        return f"made with other settings (fingerprint {manifest['fingerprint'][:10]}, expected {fingerprint[:10]})"
    for output in manifest["outputs"]:
        reason = why_altered(directory / output["path"], output, verify=verify)
        if reason is not None:
            return reason
    for name in manifest.get("present", ()):
        if not os.path.exists(directory / name):
            return f"{os.path.normpath(directory / name)} is missing"
    return None


@dataclass(frozen=True)
class StartTime:
    """When a stage started."""

    #: As `utc_now` writes it.
    utc: str
    #: On the clock of `time.monotonic`.
    monotonic_s: float

    @classmethod
    def now(cls) -> StartTime:
        return cls(utc_now(), time.monotonic())

    @classmethod
    def of(cls, utc: str) -> StartTime:
        """A time in the past, as `utc_now` wrote it."""
        return cls(utc, time.monotonic() - max(0.0, time.time() - parse_utc(utc).timestamp()))


class AlreadyComplete(Exception):
    """The directory holds exactly what was asked for; there is nothing to do."""


class StageDirectory:
    """The directory that a stage function fills, from `begin` to `finish`."""

    def __init__(self, path: Path, identity: Identity) -> None:
        self.path = path
        self.identity = identity
        self._start = StartTime.now()

    @classmethod
    @contextlib.contextmanager
    def begin(cls, path: Path, identity: Callable[[], Identity], *, alone: bool = True) -> Iterator[StageDirectory]:
        """Lock `path` and write its identity. `alone`: no other machine is writing files there.

        If the pipeline started this process, the pipeline holds the lock and has written the identity; `identity`,
        which may have to read all inputs, is then not called.

        Raises: `LockHeld`; `AlreadyComplete`; `UserError` if `path` holds results made with other parameters.
        """
        held = os.environ.get(HELD_FINGERPRINT_VARIABLE)
        if held is not None:
            record = read_identity(path)
            assert record is not None, f"{path / IDENTITY} was not written by the parent"
            assert record["fingerprint"] == held, f"{path / IDENTITY} is not the parent's"
            with signs_of_life(path):
                yield cls(path, Identity.of_record(record))
            return
        made = identity()
        with hold(path):
            claim(path, made, alone=alone)
            yield cls(path, made)

    def progress(self, label: str, total: int, unit: str, *, done: int = 0) -> Progress:
        """A progress bar for people and progress.json for programs. `done`: units completed by earlier runs."""
        return Progress(self.path / PROGRESS, label, total, unit, done)

    def finish(self, outputs: Iterable[Output], counts: dict[str, Any], *, present: Sequence[str] = ()) -> None:
        """Write the manifest, after everything else. `present`: other files that must exist."""
        finish(self.path, self.identity, outputs, counts, start=self._start, present=present)


def claim(path: Path, identity: Identity, *, alone: bool = True) -> None:
    """Write `identity` to `path`, whose lock is held, and remove the manifest of a damaged stage: whoever sees one
    takes the stage for complete. Its damaged files go as well: stages make what is missing. `alone`: no other machine
    is writing there, so all temporary files go, too.

    Raises: `AlreadyComplete`; `UserError` if `path` holds something else; `DiskError`.
    """
    before = read_identity(path)
    bookkeeping = {
        LOCK,
        ATTEMPTS,
        HOLDER,
        DAMAGED,
        *(name + end for name in (IDENTITY, PROGRESS, ALIVE) for end in ("", TEMPORARY_SUFFIX)),
    }
    ours = (".log", TEMPORARY_SUFFIX) if before is not None else (".log",)
    holds_outputs = any(p.name not in bookkeeping and not p.name.endswith(ours) for p in path.iterdir())
    same = before is not None and before["fingerprint"] == identity.fingerprint
    if holds_outputs and before is None:
        raise UserError(f"{path} is not empty and was not made by this stage; give an empty or new directory")
    if holds_outputs and before is not None and not same:
        raise UserError(
            f"{path} holds {before['stage']} made from other settings ({difference(before, identity.record())}); "
            f"give another directory, or remove this one"
        )
    if why_incomplete(path, identity.fingerprint) is None:
        raise AlreadyComplete
    if alone:
        sweep_temporaries(path)
    remove_damaged(path)
    fsync_directory(path)
    if not same:
        write_json(path / IDENTITY, identity.record())


def finish(
    path: Path,
    identity: Identity,
    outputs: Iterable[Output],
    counts: dict[str, Any],
    *,
    start: StartTime,
    present: Sequence[str] = (),
) -> None:
    """Write the manifest of a stage. `present`: paths, relative to `path`, of files that must exist, whatever their
    content."""
    from importlib.metadata import PackageNotFoundError, version

    versions = {"python": platform.python_version()}
    for package in ("torch", "transformers", "tokenizers", "h5py", "numpy"):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    write_json(
        path / MANIFEST,
        {
            **identity.record(),
            "outputs": [output.record() for output in outputs],
            **({"present": list(present)} if present else {}),
            "counts": counts,
            "started": start.utc,
            "seconds": round(time.monotonic() - start.monotonic_s, 3),
            "versions": versions,
        },
    )
    with disk_errors(path):
        for name in (PROGRESS, ALIVE):
            (path / name).unlink(missing_ok=True)


def difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """The first difference between two identity records, `lr: 0.0004 → 0.0005`; empty if there is none."""
    for part in ("stage", "phase", "format_version", "parameters", "inputs", "upstream"):
        a, b = old.get(part), new.get(part)
        if a == b:
            continue
        if not (isinstance(a, dict) and isinstance(b, dict)):
            return f"{part}: {a} → {b}"
        for key in sorted({*a, *b}):
            if a.get(key) != b.get(key):
                name = key if part == "parameters" else f"{part}.{key}"
                return f"{name}: {a.get(key)} → {b.get(key)}"
    return ""
