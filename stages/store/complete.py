"""Complete stages in a store: found by fingerprint, pushed whole, fetched whole."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import socket
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from common.console import log
from common.disk_space import require_disk_space
from common.errors import UserError
from common.files import (
    TEMPORARY_SUFFIX,
    disk_errors,
    failpoint,
    fsync_directory,
    read_json,
    rename_durably,
    sha256_of,
    utc_now,
    write_json,
)
from stages.directory.manifest import IDENTITY, MANIFEST, why_incomplete
from stages.directory.records import read_manifest
from stages.store.backend import Altered, Backend, Conflict, Missing, Report
from stages.store.files import (
    NotUsable,
    checkpoint_files,
    download,
    ignore,
    measured,
    one_push,
    reason,
    snapshot,
    upload,
)
from stages.store.records import RESUMED_RECORDS, Damaged, StageRecord, StoredFile, require_inside, stage_key
from stages.store.removals import await_removals
from trainer.checkpoint.directory import CHECKPOINTS, whole_checkpoints
from trainer.checkpoint.stable import stable_step

#: Files of a complete stage that its manifest does not list as outputs.
_RECORDS = (IDENTITY, *RESUMED_RECORDS, "results.json", "config.json", "settings.json")
#: Attempts at pushing a stage while others remove files of it.
_TRIES = 3
#: In a stage directory: {"url"} of the store that has it.
STORED = "stored.json"


def find_stage(backend: Backend, label: str, fingerprint: str) -> StageRecord | None:
    """The record of a complete stage; None if there is none. A damaged one is logged and counts as none.

    Raises `UserError`.
    """
    key = stage_key(label, fingerprint)
    try:
        return StageRecord.decode(backend.read(key)[0], label, fingerprint)
    except Missing:
        return None
    except Damaged as error:
        log(f"note: {backend.url}/{key} is damaged ({error}); it is not used")
        return None


def stored_manifest(backend: Backend, record: StageRecord) -> dict[str, Any] | None:
    """The manifest of a complete stage in the store; None if it is damaged or gone. Raises `UserError`."""
    last = record.files[-1]
    try:
        data = backend.read(last.key)[0]
    except Missing:
        return None
    if last.path != MANIFEST or hashlib.sha256(data).hexdigest() != last.sha256:
        return None
    manifest: dict[str, Any] = json.loads(data)
    return manifest if manifest.get("fingerprint") == record.fingerprint else None


def push_stage(
    backend: Backend, directory: Path, label: str, report: Report = ignore, expect: Callable[[int], object] = ignore
) -> StageRecord:
    """Push the complete stage in `directory`: its files, then its record. What the store has is not sent again.

    `expect` is called with the total bytes before the first call of `report`. Raises `UserError`, including for a stage
    that is not complete or whose files were altered.
    """
    with one_push(directory):
        return _push(backend, directory, label, report, expect)


def _push(
    backend: Backend, directory: Path, label: str, report: Report, expect: Callable[[int], object]
) -> StageRecord:
    manifest = read_manifest(directory)
    why = "never finished" if manifest is None else why_incomplete(directory, manifest["fingerprint"])
    if manifest is None or why is not None:
        raise UserError(f"{directory} is not complete ({why}); only complete stages are pushed")
    outputs = [StoredFile(output["path"], output["bytes"], output["sha256"]) for output in manifest["outputs"]]
    # Files that people edit, such as the model card beside the model, or that grow.
    listed = {output.path for output in outputs}
    names = [name for name in (*_RECORDS, *manifest.get("present", ())) if (directory / name).is_file()]
    names = [name for name in names if name not in listed]
    with snapshot(directory, names, directory / "push", copies=True) as copies:
        records = [measured(copies[name], name) for name in names]
        others = [file for file in _extendable(directory) if file.path not in listed]
        files = (*outputs, *others, *records, measured(directory / MANIFEST, MANIFEST))
        record = StageRecord(label, manifest["fingerprint"], files, utc_now(), socket.gethostname())
        paths = {file.key: copies.get(file.path, directory / file.path) for file in files}
        by_key = {file.key: file for file in files}
        expect(sum(file.bytes for file in by_key.values()))
        for _ in range(_TRIES):
            relied_on = upload(backend, by_key, paths, report)
            failpoint("store-record")
            is_ours = _write_record(backend, record)
            # After a removal anything may be gone. Without one: what was there before this push may be, and an older
            # record has its files or has been removed with them.
            needed = {*by_key, record.key} if await_removals(backend) else relied_on if is_ours else {record.key}
            if backend.present(needed).keys() >= needed:
                break
            log(f"note: files were removed from {backend.url}; those of {label} that are missing are pushed again")
        else:
            raise UserError(f"{backend.url} keeps losing files of {label} while it is pushed; run the same again")
    _mark(directory, backend)
    return record


def _extendable(directory: Path) -> list[StoredFile]:
    """The files of the checkpoint from which a training run longer than the one in `directory` would continue."""
    for _, path in whole_checkpoints(directory / CHECKPOINTS):
        if stable_step(path) is not None:
            place = path.relative_to(directory).as_posix()
            return [
                dataclasses.replace(file, path=f"{place}/{file.path}") for file in checkpoint_files(path / MANIFEST)
            ]
    return []


def _write_record(backend: Backend, record: StageRecord) -> bool:
    """Write `record` unless the store has one, with the same outputs; a damaged one is replaced. Returns whether it was
    written. The files of `record` are in the store, but those that were there before may have been pruned meanwhile."""
    while True:
        version = None
        with contextlib.suppress(Missing):
            data, version = backend.read(record.key)
            with contextlib.suppress(Damaged):
                theirs = {file.key for file in StageRecord.decode(data, record.label, record.fingerprint).files}
                others = theirs - {file.key for file in record.files}
                if backend.present(others).keys() == others:
                    return False
        with contextlib.suppress(Conflict):
            backend.write(record.key, record.encode(), replaces=version)
            return True


def fetch_stage(
    backend: Backend,
    record: StageRecord,
    directory: Path,
    *,
    siblings: Collection[str] = (),
    report: Report = ignore,
) -> None:
    """Fetch a complete stage into `directory`, whose lock is held: first its identity, without which a later run would
    not recognise what an interrupted one has left there, and its manifest last.

    `siblings`: names of directories beside it that it may put files into. Files already there with the right sha256
    are not fetched. Raises `NotUsable`, `UserError`.
    """
    *files, last = record.files
    manifest = directory / (MANIFEST + TEMPORARY_SUFFIX)
    try:
        require_inside(files, siblings)
        if last.path != MANIFEST:
            raise Damaged(f"its last file is {last.path}, not {MANIFEST}")
        for file in files:
            if file.path == IDENTITY and not _is_there(directory, file):
                download(backend, {file.key: file}, {file.key: [directory / IDENTITY]})
                fsync_directory(directory)
                failpoint("store-fetched-identity")
        download(backend, {last.key: last}, {last.key: [manifest]})
        times, present = _read_manifest(manifest, record)
        beside = {file.path for file in files if file.path.startswith("..")}
        if not beside <= present:
            raise Damaged(f"its manifest does not name {', '.join(sorted(beside - present))}")
        # Beside the stage are files that people edit, such as the model's card: what is there stays as it is.
        kept = {path for path in beside if (directory / path).exists()}
        wanted = [file for file in files if file.path not in kept and not _is_there(directory, file)]
        require_disk_space(directory, sum(file.bytes for file in wanted), f"{record.label} of the store needs")
        targets: dict[str, list[Path]] = {}
        for file in wanted:
            targets.setdefault(file.key, []).append(directory / file.path)
        report(record.total_bytes - sum(file.bytes for file in wanted))
        download(backend, {file.key: file for file in wanted}, targets, report)
    except (Damaged, Missing, Altered) as error:
        altered = error.args if isinstance(error, Altered) else ()
        raise NotUsable(f"{backend.url}/{record.key}: {reason(error)}", altered) from None
    with disk_errors(directory):
        for path, ns in times.items():
            os.utime(directory / path, ns=(ns, ns))
    for parent in {(directory / file.path).parent for file in wanted}:
        fsync_directory(parent)
    failpoint("store-fetched")
    rename_durably(manifest, directory / MANIFEST)
    _mark(directory, backend)


def is_marked(directory: Path, url: str) -> bool:
    """Whether the stage directory notes that the store at `url` has the stage."""
    return (read_json(directory / STORED) or {}).get("url") == url


def _mark(directory: Path, backend: Backend) -> None:
    write_json(directory / STORED, {"url": backend.url})


def _is_there(directory: Path, file: StoredFile) -> bool:
    path = directory / file.path
    try:
        return path.stat().st_size == file.bytes and sha256_of(path) == file.sha256
    except OSError:
        return False


def _read_manifest(manifest: Path, record: StageRecord) -> tuple[dict[str, int], set[str]]:
    """Times that outputs in the fetched manifest must have, by path; and the files beside the stage that must be there.
    Raises `Damaged` for a manifest of another stage, or with other outputs than the record's."""
    listed = {(file.path, file.sha256) for file in record.files}
    try:
        content = json.loads(manifest.read_bytes())
        is_its = content["fingerprint"] == record.fingerprint
        is_its &= {(output["path"], output["sha256"]) for output in content["outputs"]} <= listed
        times = {output["path"]: int(output["mtime_ns"]) for output in content["outputs"] if "mtime_ns" in output}
        present = set(content.get("present", ()))
    except (ValueError, KeyError, TypeError):
        is_its, times, present = False, {}, set()
    if not is_its:
        raise Damaged("its manifest is for something else")
    return times, present
