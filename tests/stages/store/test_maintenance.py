"""What is removed from a store is what was asked for and what nothing needs, and never more."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from common.secrets import Secret
from stages.directory.manifest import Identity
from stages.store import maintenance
from stages.store.backend import Backend
from stages.store.checkpoints import fetch_checkpoint, push_checkpoint
from stages.store.complete import fetch_stage, find_stage, push_stage
from stages.store.lease import Holder, Lease, LeaseRecord, lease_key
from stages.store.maintenance import GRACE_S, Contents, StoredStage
from stages.store.open import open_store
from stages.store.options import StoreOptions
from stages.store.records import StageRecord, StoredFile
from tests.helpers.stores.machine import LEASE_S, checkpoint_of, write
from tests.stages.store.test_complete import FILES, make
from trainer.checkpoint.directory import CHECKPOINTS

DAY = 86400.0
LABEL = "shard_dataset-phase1"
TRAINING, NAME = lease_key("pretrain", "0" * 64), f"pretrain-{'0' * 64}"


@pytest.fixture
def backend(tmp_path: Path) -> Backend:
    return open_store(StoreOptions(url=Secret.address(str(tmp_path / "store"))))


def stage(backend: Backend, directory: Path, seed: int, **files: bytes) -> Identity:
    """Push a complete stage with these files in addition to those that all stages have."""
    identity = Identity("shard_dataset", 1, 1, {"seed": seed})
    push_stage(backend, make(directory / f"stage-{seed}", identity, {**FILES, **files}), LABEL)
    return identity


def age(root: Path, days: float, prefix: str = "") -> None:
    """Make what is in the store this much older."""
    for path in (root / prefix).rglob("*"):
        then = path.stat().st_mtime - days * DAY
        os.utime(path, (then, then))


def prune(backend: Backend, *, days: float | None = None, most: int | None = None, keep: int | None = None) -> set[str]:
    """Prune as the command does; returns the names of what is gone."""
    contents = maintenance.read(backend)
    now = maintenance.now_of(backend)
    seconds = None if days is None else days * DAY
    gone = maintenance.superfluous(contents, older_than_s=seconds, most_bytes=most, newest=keep, now=now)
    told = sum(e.bytes for e in maintenance.unreferenced(maintenance.without(contents, gone), gone, now))
    assert maintenance.remove(backend, contents, gone, now) == told
    return {one.name for one in gone}


def assert_whole(backend: Backend, directory: Path, *stages: Identity) -> None:
    """These stages are there and can be fetched; no others are."""
    contents = maintenance.read(backend)
    assert {one.record.fingerprint for one in contents.stages} == {one.fingerprint for one in stages}
    assert not maintenance.verify(backend, contents, read_all=True)
    for one in stages:
        record = find_stage(backend, LABEL, one.fingerprint)
        assert record is not None
        (directory / one.fingerprint).mkdir(parents=True)
        fetch_stage(backend, record, directory / one.fingerprint)


def test_files_that_another_stage_needs_stay(backend: Backend, tmp_path: Path) -> None:
    old = stage(backend, tmp_path, 1, only=b"old")
    age(tmp_path / "store", 40)
    new = stage(backend, tmp_path, 2, other=b"new")
    before = maintenance.read(backend).files
    assert prune(backend, days=30) == {f"{LABEL}-{old.fingerprint[:10]}"}
    assert_whole(backend, tmp_path / "fetched", new)
    gone = before.keys() - maintenance.read(backend).files.keys()
    assert sorted(before[key].bytes for key in gone)[0] == len(b"old")
    assert not prune(backend, days=30)


def test_age_number_and_size_choose_the_oldest() -> None:
    """Compared with the definition, on stages that share files."""
    files = [StoredFile(f"f{n}", 10, f"{n:064x}") for n in range(6)]
    contents = Contents(
        stages=[
            StoredStage(StageRecord(label, f"{at:064x}", tuple(files[at : at + 2]), "", ""), written=100.0 * at)
            for at, label in reversed(list(enumerate("abaab")))
        ]
    )

    def gone(**asked: Any) -> list[float]:
        none: dict[str, Any] = {"older_than_s": None, "most_bytes": None, "newest": None}
        return sorted(one.written for one in maintenance.superfluous(contents, **{**none, **asked}, now=400.0))

    assert gone() == []
    assert gone(older_than_s=250) == [0, 100]
    assert gone(newest=1) == [0, 100, 200]
    assert gone(newest=2) == [0]
    # Five stages of two files each, where neighbours share one: 6 files of 10 bytes.
    assert [gone(most_bytes=n) for n in (60, 59, 50, 49, 20, 19)] == [
        [], [0], [0], [0, 100], [0, 100, 200, 300], [0, 100, 200, 300, 400],
    ]  # fmt: skip


def test_what_is_pushed_while_others_are_removed_keeps_its_files(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A push finds the files of an old stage, which is then removed, and writes its own record."""
    stage(backend, tmp_path, 1)
    age(tmp_path / "store", 40)
    delete, pushed = backend.delete, list[Identity]()

    def push_first(keys: Any) -> None:
        if not pushed:
            pushed.append(Identity("shard_dataset", 1, 1, {"seed": 2}))
            stage(backend, tmp_path, 2)
        delete(keys)

    monkeypatch.setattr(backend, "delete", push_first)
    contents = maintenance.read(backend)
    now = maintenance.now_of(backend)
    gone = maintenance.superfluous(contents, older_than_s=30 * DAY, most_bytes=None, newest=None, now=now)
    maintenance.remove(backend, contents, gone, now)
    assert_whole(backend, tmp_path / "fetched", *pushed)


def test_a_push_that_ends_before_its_files_are_removed_sends_them_again(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has found the files of the old stage, and written its record when the old one is gone."""
    stage(backend, tmp_path, 1)
    age(tmp_path / "store", 40)
    delete = backend.delete
    with ThreadPoolExecutor(1) as thread:
        pushing: list[Future[Identity]] = []

        def push_before_files(keys: Any) -> None:
            keys = list(keys)
            if any(key.startswith("objects/") for key in keys):
                pushing.append(thread.submit(stage, backend, tmp_path, 2))
                while not list(backend.list("stages/")):
                    time.sleep(0.01)
            delete(keys)

        monkeypatch.setattr(backend, "delete", push_before_files)
        prune(backend, days=30)
        assert_whole(backend, tmp_path / "fetched", pushing[0].result())


def test_a_push_that_looks_before_files_are_removed_and_ends_after_it_is_whole(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds the files of the old stage, and writes its record after they are gone."""
    stage(backend, tmp_path, 1)
    age(tmp_path / "store", 40)
    write_record, looked, is_pruned = backend.write, threading.Event(), threading.Event()

    def after_the_prune(key: str, *rest: Any, **named: Any) -> Any:
        if key.startswith("stages/"):
            looked.set()
            assert is_pruned.wait(60)
        return write_record(key, *rest, **named)

    monkeypatch.setattr(backend, "write", after_the_prune)
    with ThreadPoolExecutor(1) as thread:
        pushing = thread.submit(stage, backend, tmp_path, 2)
        assert looked.wait(60)
        assert prune(backend, days=30)
        is_pruned.set()
        assert_whole(backend, tmp_path / "fetched", pushing.result())


def test_no_clock_of_this_machine_makes_a_push_old(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage(backend, tmp_path, 1)
    for key in [entry.key for entry in backend.list("stages/")]:
        backend.delete([key])  # a push in progress, whose record comes last
    monkeypatch.setattr(time, "time", lambda: 2e9)
    prune(backend, days=30)
    assert maintenance.read(backend).files


def test_nothing_is_removed_beside_a_damaged_record(backend: Backend, tmp_path: Path) -> None:
    """Its files would look like those that nothing needs."""
    stage(backend, tmp_path, 1)
    stage(backend, tmp_path, 2)
    (one, _) = sorted((tmp_path / "store/stages").rglob("*.json"))
    one.write_bytes(one.read_bytes()[:-20])
    age(tmp_path / "store", 40)
    with pytest.raises(UserError, match="has 1 damaged record, "):
        prune(backend, days=30)
    assert len(maintenance.read(backend).stages) == 1


def test_what_a_training_replaces_meanwhile_is_not_damaged(backend: Backend, training: Lease, tmp_path: Path) -> None:
    contents = maintenance.read(backend)
    for step in (3, 4):
        path = tmp_path / "run" / CHECKPOINTS / f"ckpt_{step}"
        write(path, checkpoint_of(step))
        push_checkpoint(backend, training, NAME, tmp_path / "run", path, alone=contextlib.nullcontext())
    assert maintenance.verify(backend, contents, read_all=True) == {}


def test_files_without_a_record_stay_for_a_day(backend: Backend, tmp_path: Path) -> None:
    stage(backend, tmp_path, 1)
    for key in [entry.key for entry in backend.list("stages/")]:
        backend.delete([key])
    age(tmp_path / "store", 0.9 * GRACE_S / DAY)
    prune(backend)
    assert maintenance.read(backend).files
    age(tmp_path / "store", 0.2 * GRACE_S / DAY)
    prune(backend)
    assert not maintenance.read(backend).files


def test_unfinished_files_of_others_in_a_shared_folder_stay(backend: Backend, tmp_path: Path) -> None:
    stage(backend, tmp_path, 1)
    store = tmp_path / "store"
    ours = [store / folder / "x.tmp" for folder in ("stages/a", "objects/aa", "leases", "checkpoints/a/1", "probe")]
    theirs = [store / "letter.tmp", store / "texts" / "a.tmp"]
    for path in (*ours, *theirs):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half a file")
    age(store, 0.9 * GRACE_S / DAY)
    prune(backend)
    assert all(path.exists() for path in (*ours, *theirs))
    age(store, 0.2 * GRACE_S / DAY)
    prune(backend)
    assert [path.exists() for path in ours] == [False] * len(ours)
    assert all(path.exists() for path in theirs)


@pytest.fixture
def training(backend: Backend, tmp_path: Path) -> Lease:
    """Two checkpoints of a training run whose machine is gone."""
    holder = Holder("a", "host-a", 1, "2026-01-01T00:00:00Z")
    lease = Lease.acquire(backend, TRAINING, holder, LEASE_S, wait=lambda other: pytest.fail("it waits"))
    for step in (1, 2):
        path = tmp_path / "run" / CHECKPOINTS / f"ckpt_{step}"
        write(path, checkpoint_of(step))
        push_checkpoint(backend, lease, NAME, tmp_path / "run", path, alone=contextlib.nullcontext())
    return lease


def test_a_training_that_nobody_goes_on_with_is_removed_by_age(
    backend: Backend, training: Lease, tmp_path: Path
) -> None:
    assert not prune(backend, days=30, keep=1, most=0)
    age(tmp_path / "store", 31)
    assert prune(backend, days=30) == {"pretrain-0000000000"}
    assert not maintenance.read(backend).files
    record = LeaseRecord.read(backend, TRAINING)
    assert (record.checkpoints, record.token) == ((), training.token), "the fencing token goes on"


def test_a_training_that_is_taken_up_meanwhile_is_left_alone(backend: Backend, training: Lease, tmp_path: Path) -> None:
    age(tmp_path / "store", 31)
    contents = maintenance.read(backend)
    now = maintenance.now_of(backend)
    gone = maintenance.superfluous(contents, older_than_s=30 * DAY, most_bytes=None, newest=None, now=now)
    training.renew()
    assert maintenance.remove(backend, contents, gone, now) == 0
    assert fetch_checkpoint(backend, LeaseRecord.read(backend, TRAINING), NAME, tmp_path / "there", -1) is not None


def test_a_damaged_checkpoint_is_removed_with_its_entry(backend: Backend, training: Lease, tmp_path: Path) -> None:
    newest = training.record.checkpoints[-1]
    shared = {file.sha256 for file in training.record.checkpoints[0].files}
    (sha256, *_) = [file.sha256 for file in newest.files if file.sha256 not in shared]
    (tmp_path / "store/checkpoints" / NAME / "1" / sha256).write_bytes(b"poison")
    contents = maintenance.read(backend)
    wrong = maintenance.verify(backend, contents, read_all=True)
    assert list(wrong) == [f"checkpoints/{NAME}/1/{sha256}"]
    assert maintenance.remove_damaged(backend, contents, wrong) == []
    assert not maintenance.verify(backend, maintenance.read(backend), read_all=True)
    fetched = fetch_checkpoint(backend, LeaseRecord.read(backend, TRAINING), NAME, tmp_path / "there", -1)
    assert fetched is not None
    assert fetched.step == 1
    training.renew()  # a trainer that continues lists what is there
    assert [one.step for one in training.record.checkpoints] == [1]


def test_a_record_that_cannot_be_read_is_not_taken_for_damaged(
    backend: Backend, training: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = backend.read

    def refused(key: str) -> tuple[bytes, str]:
        if key == TRAINING:
            raise UserError("the store cannot be read")
        return read(key)

    monkeypatch.setattr(backend, "read", refused)
    with pytest.raises(UserError, match="the store cannot be read"):
        maintenance.read(backend)


def test_a_folder_that_cannot_be_read_is_not_taken_for_empty(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its records would be missed, and what they refer to removed."""
    stage(backend, tmp_path, 1)
    age(tmp_path / "store", 2)
    scandir: Any = os.scandir

    def refused(path: Any) -> Iterator[Any]:
        if str(path).endswith(LABEL):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        found: Iterator[Any] = scandir(path)
        return found

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(UserError, match=rf"{LABEL} cannot be read: Input/output error; check its permissions"):
        maintenance.read(backend)
