"""A training run's checkpoints in a store: rolled-back ones are not resumed from, damaged ones are replaced."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from common.files import METRICS
from common.secrets import Secret
from stages.store.backend import Backend
from stages.store.checkpoints import (
    fetch_checkpoint,
    forget_newer,
    forget_set_aside,
    newest_step,
    push_checkpoint,
    stored_state,
)
from stages.store.lease import Holder, Lease, LeaseRecord
from stages.store.open import open_store
from stages.store.options import StoreOptions
from tests.helpers.stores.interleaved import Shared
from tests.helpers.stores.machine import LEASE_S, checkpoint_of, write
from trainer.checkpoint.directory import CHECKPOINTS, set_aside, whole_checkpoints

KEY, NAME = Shared.lease_key, Shared.name


@pytest.fixture
def backend(tmp_path: Path) -> Backend:
    return open_store(StoreOptions(url=Secret.address(str(tmp_path / "store"))))


def taken(backend: Backend) -> Lease:
    holder = Holder("a", "host-a", 1, "2026-01-01T00:00:00Z")
    return Lease.acquire(backend, KEY, holder, LEASE_S, wait=lambda other: pytest.fail("it waits"))


def push(backend: Backend, lease: Lease, directory: Path, step: int) -> Path:
    path = directory / CHECKPOINTS / f"ckpt_{step}"
    write(path, checkpoint_of(step))
    push_checkpoint(backend, lease, NAME, directory, path, alone=contextlib.nullcontext())
    return path


def steps(record: LeaseRecord) -> list[int]:
    return [one.step for one in record.checkpoints]


def test_a_training_that_was_rolled_back_is_not_undone(backend: Backend, tmp_path: Path) -> None:
    """Steps 2 and 3 are set aside, as --resume_step 1 does; then training continues and makes new ones."""
    lease, directory = taken(backend), tmp_path / "run"
    first = push(backend, lease, directory, 1)
    for step in (2, 3):
        push(backend, lease, directory, step)
    aside = [directory / CHECKPOINTS / f"ckpt_{step}" for step in (3, 2)]
    assert first.exists()
    assert set_aside(directory / CHECKPOINTS, aside, directory / METRICS)
    lease = taken(backend)
    assert steps(lease.record) == [2, 3]
    assert fetch_checkpoint(backend, lease.record, NAME, directory, newest_step(directory)) is None
    forget_newer(backend, lease, NAME, newest_step(directory))
    assert steps(LeaseRecord.read(backend, KEY)) == []
    assert not list(backend.list("checkpoints/"))
    assert [step for step, _ in whole_checkpoints(directory / CHECKPOINTS)] == [1]
    push(backend, lease, directory, 2)
    assert steps(LeaseRecord.read(backend, KEY)) == [2]


def test_what_cannot_be_used_makes_room_for_what_is_trained_instead(backend: Backend, tmp_path: Path) -> None:
    lease = taken(backend)
    for step in (4, 5):
        push(backend, lease, tmp_path / "lost", step)
    newest = lease.record.checkpoints[-1]
    for file in newest.files:
        (tmp_path / "store/checkpoints" / NAME / str(newest.token) / file.sha256).write_bytes(b"poison")
    lease, here = taken(backend), tmp_path / "here"
    fetched = fetch_checkpoint(backend, lease.record, NAME, here, newest_step(here))
    assert fetched is not None
    assert fetched.step == 4
    forget_newer(backend, lease, NAME, newest_step(here))
    assert steps(LeaseRecord.read(backend, KEY)) == [4]
    assert fetch_checkpoint(backend, LeaseRecord.read(backend, KEY), NAME, tmp_path / "third", -1) is not None


def test_a_listed_checkpoint_without_the_trainers_state_counts_as_damaged(backend: Backend, tmp_path: Path) -> None:
    """As another version or a person may list it; the record is sealed and whole."""
    lease = taken(backend)
    push(backend, lease, tmp_path / "run", 1)
    (listed,) = LeaseRecord.read(backend, KEY).checkpoints
    assert "state.json" not in [file.path for file in listed.files]
    assert stored_state(backend, NAME, listed) is None


def damage(path: Path) -> None:
    """Other bytes of the same size, as a disk may return them."""
    data = (path / "model").read_bytes()
    (path / "model").write_bytes(data[::-1])
    assert len(data) == (path / "model").stat().st_size
    assert data != data[::-1]


def test_a_damaged_checkpoint_is_replaced_by_the_one_in_the_store(backend: Backend, tmp_path: Path) -> None:
    lease, directory = taken(backend), tmp_path / "run"
    for step in (1, 2):
        newest = push(backend, lease, directory, step)
    damage(newest)
    lease = taken(backend)
    fetched = fetch_checkpoint(backend, lease.record, NAME, directory, newest_step(directory))
    assert fetched is not None
    assert fetched.step == 2
    assert {file.name: file.read_bytes() for file in newest.iterdir()} == checkpoint_of(2)
    forget_newer(backend, lease, NAME, newest_step(directory))
    assert steps(LeaseRecord.read(backend, KEY)) == [1, 2]


def test_one_that_was_set_aside_because_it_is_damaged_is_fetched(backend: Backend, tmp_path: Path) -> None:
    """A training that found it while the store could not be reached went on from step 1."""
    lease, directory = taken(backend), tmp_path / "run"
    for step in (1, 2):
        newest = push(backend, lease, directory, step)
    damage(newest)
    assert set_aside(directory / CHECKPOINTS, [newest], directory / METRICS)
    forget_set_aside(backend, lease, NAME, directory)
    assert steps(lease.record) == [1, 2]
    fetched = fetch_checkpoint(backend, lease.record, NAME, directory, newest_step(directory))
    assert fetched is not None
    assert {file.name: file.read_bytes() for file in newest.iterdir()} == checkpoint_of(2)


def test_a_damaged_checkpoint_is_no_reason_to_fetch_an_older_one(backend: Backend, tmp_path: Path) -> None:
    lease, directory = taken(backend), tmp_path / "run"
    for step in (1, 2):
        push(backend, lease, directory, step)
    newest = directory / CHECKPOINTS / "ckpt_3"
    write(newest, checkpoint_of(3))
    damage(newest)
    assert fetch_checkpoint(backend, lease.record, NAME, directory, newest_step(directory)) is None
    forget_newer(backend, lease, NAME, newest_step(directory))
    assert steps(lease.record) == [1, 2]
