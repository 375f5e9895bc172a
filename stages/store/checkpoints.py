"""Checkpoints of incomplete training runs, in a store."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from common.console import log
from common.disk_space import require_disk_space
from common.files import (
    METRICS,
    TEMPORARY_SUFFIX,
    disk_errors,
    failpoint,
    fresh_directory,
    fsync_directory,
    rename_durably,
    sha256_of,
)
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
from stages.store.lease import Lease, LeaseRecord, StoredCheckpoint, lease_key, name_holder
from stages.store.records import CHECKPOINTS as PREFIX
from stages.store.records import RESUMED_RECORDS, Damaged, full_name
from trainer.checkpoint.directory import (
    CHECKPOINTS,
    MANIFEST,
    abandoned,
    checkpoint_step,
    whole_checkpoints,
    why_invalid,
)
from trainer.state import STATE

#: How many checkpoints of a training run the store keeps.
KEPT = 2


def stored_state(backend: Backend, name: str, checkpoint: StoredCheckpoint) -> dict[str, Any] | None:
    """The trainer's state in a checkpoint of the training run `name`; None if it is damaged or gone. Raises
    `UserError`."""
    file = next((file for file in checkpoint.files if file.path == STATE), None)
    if file is None:
        return None
    try:
        data = backend.read(checkpoint.key(name, file))[0]
    except Missing:
        return None
    state: dict[str, Any] = json.loads(data) if hashlib.sha256(data).hexdigest() == file.sha256 else {}
    return state or None


def push_checkpoint(
    backend: Backend,
    lease: Lease,
    name: str,
    directory: Path,
    path: Path,
    *,
    alone: contextlib.AbstractContextManager[object],
    report: Report = ignore,
) -> None:
    """Push the checkpoint `path` of the training run `name` (its `full_name`) in `directory`; the newest `KEPT`
    stay in the store. `alone`: entered while the lease is used.

    Raises `NotUsable` for one that is gone or damaged by now; `LeaseLost`; `UserError`.
    """
    resumed = [one for one in RESUMED_RECORDS if (directory / one).is_file()]
    try:
        with (
            one_push(directory),
            snapshot(path, [file.name for file in path.iterdir()], directory / "push-links", copies=False) as links,
            snapshot(directory, resumed, directory / "push-copies", copies=True) as copies,
        ):
            files = checkpoint_files(links[MANIFEST])
            records = [measured(copy, one) for one, copy in copies.items()]
            new = StoredCheckpoint(path.name, lease.token, tuple(files), tuple(records))
            paths = {new.key(name, file): links[file.path] for file in files}
            paths |= {new.key(name, file): copies[file.path] for file in records}
            upload(backend, new.by_key(name), paths, report)
    except (FileNotFoundError, KeyError) as error:
        raise NotUsable(f"{path} is gone or damaged: {error}") from None
    failpoint("store-checkpoint")
    with alone:
        before = lease.record.checkpoints
        lease.keep((*[one for one in before if one.step < new.step][-(KEPT - 1) :], new))
        dropped = _keys(name, before) - _keys(name, lease.record.checkpoints)
    backend.delete(dropped)


def fetch_checkpoint(
    backend: Backend, record: LeaseRecord, name: str, directory: Path, here: int
) -> StoredCheckpoint | None:
    """Fetch the newest usable checkpoint if it is newer than step `here`, the `newest_step` of `directory`, whose lock
    is held. One that was set aside there when the training was rolled back is not fetched again.

    None: nothing was fetched. What cannot be used is logged. Raises `UserError`.
    """
    for checkpoint in reversed(record.checkpoints):
        if checkpoint.step <= here:
            return None
        if _is_set_aside(checkpoint, directory):
            log(f"note: {checkpoint.name} in the store was set aside here; it is not fetched")
            continue
        try:
            _fetch(backend, checkpoint, name, directory)
        except (Damaged, Missing, Altered) as error:
            log(f"note: {checkpoint.name} in the store cannot be used: {reason(error)}")
            continue
        return checkpoint
    return None


def forget_newer(backend: Backend, lease: Lease, name: str, here: int) -> None:
    """Remove the stored checkpoints that are newer than step `here`, from which the training goes on: they could not be
    used or were set aside, and it will write others for these steps. Raises `LeaseLost`, `UserError`."""
    _keep(backend, lease, name, lambda checkpoint: checkpoint.step <= here)


def forget_set_aside(backend: Backend, lease: Lease, name: str, directory: Path) -> None:
    """Remove the stored checkpoints from which the training in `directory` was rolled back. Raises `LeaseLost`,
    `UserError`."""
    _keep(backend, lease, name, lambda checkpoint: not _is_set_aside(checkpoint, directory))


def _keep(backend: Backend, lease: Lease, name: str, is_kept: Callable[[StoredCheckpoint], bool]) -> None:
    before = lease.record.checkpoints
    kept = tuple(filter(is_kept, before))
    if kept != before:
        lease.keep(kept)
        backend.delete(_keys(name, before) - _keys(name, kept))


def newest_step(directory: Path) -> int:
    """The global step of the training's newest intact checkpoint there; -1: none. Reads every byte of it."""
    found = whole_checkpoints(directory / CHECKPOINTS)
    return next((step for step, path in found if why_invalid(path) is None), -1)


def _is_set_aside(checkpoint: StoredCheckpoint, directory: Path) -> bool:
    """Whether the training there was rolled back from it. What was set aside because it is damaged does not count."""
    manifests = {file.sha256 for file in checkpoint.files if file.path == MANIFEST}
    places = abandoned(directory / CHECKPOINTS)
    found = (path for place in places for path in place.glob(f"{checkpoint.name}/{MANIFEST}"))
    return any(sha256_of(path) in manifests and why_invalid(path.parent) is None for path in found)


def _fetch(backend: Backend, checkpoint: StoredCheckpoint, name: str, directory: Path) -> None:
    if checkpoint_step(Path(checkpoint.name)) is None:
        raise Damaged(f"its name is {checkpoint.name}")
    final = directory / CHECKPOINTS / checkpoint.name
    temporary = final.with_name(final.name + TEMPORARY_SUFFIX)
    size = sum(file.bytes for file in (*checkpoint.files, *checkpoint.records))
    require_disk_space(directory, size, f"{checkpoint.name} of the store needs")
    with disk_errors(final):
        fresh_directory(temporary, parents=True)
    targets: dict[str, list[Path]] = {}
    for file in checkpoint.files:
        targets.setdefault(checkpoint.key(name, file), []).append(temporary / file.path)
    records = {directory / f"{file.path}.fetched{TEMPORARY_SUFFIX}": file for file in checkpoint.records}
    for path, file in records.items():
        targets.setdefault(checkpoint.key(name, file), []).append(path)
    download(backend, checkpoint.by_key(name), targets)
    fsync_directory(temporary)
    for path, file in records.items():  # now that all of it is here
        rename_durably(path, directory / file.path)
    _date_metrics(directory / METRICS)
    failpoint("store-fetched-checkpoint")
    rename_durably(temporary, final)  # over a damaged one, or this one would not have been fetched


def _date_metrics(path: Path) -> None:
    """Give metrics.jsonl the time of its last record: until then the machine that wrote it gave signs of life."""
    with contextlib.suppress(FileNotFoundError, IndexError, KeyError, TypeError, ValueError):
        written = float(json.loads(path.read_bytes().splitlines()[-1])["time"])
        os.utime(path, (written, written))


def forget_checkpoints(
    backend: Backend, lease: Lease, name: str, alone: contextlib.AbstractContextManager[object]
) -> None:
    """Remove the checkpoints of a complete training run, and what killed pushes of them have left behind.

    Those of later leases stay: by now another machine may have taken the lease and pushed new ones.
    """
    with alone:
        lease.keep(())
    _delete(backend, name, lease.token)


def conclude(backend: Backend, directory: Path, label: str, fingerprint: str) -> None:
    """The store has the complete stage in `directory`, whose lock is held: release the lease that a process stopped
    there has left, and remove the training's checkpoints. A lease of another machine stays. Raises `UserError`."""
    key = lease_key(label, fingerprint)
    record = LeaseRecord.read(backend, key)
    over = dataclasses.replace(record, holder=None, checkpoints=())
    if over == record or (record.holder is not None and record.holder.id != name_holder(directory).id):
        return
    with contextlib.suppress(Conflict):  # another machine is taking it
        backend.write(key, over.encode(), replaces=record.version)
        _delete(backend, full_name(label, fingerprint), record.token)


def _delete(backend: Backend, name: str, token: int) -> None:
    """Remove the files of a training run's checkpoints of all leases up to `token`."""
    leases = {str(number) for number in range(1, token + 1)}
    keys = {entry.key for entry in backend.list(f"{PREFIX}/{name}/")}
    backend.delete({key for key in keys if key.split("/")[-2] in leases})


def _keys(name: str, checkpoints: Iterable[StoredCheckpoint]) -> set[str]:
    """The keys of the files of a training run's checkpoints."""
    return {key for one in checkpoints for key in one.by_key(name)}
