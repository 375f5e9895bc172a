"""`python -m pipeline store`: what an interrupted push leaves is removed, and what a run would fetch is said before."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from common.secrets import Secret
from stages.store.backend import Backend
from stages.store.checkpoints import push_checkpoint
from stages.store.lease import Holder, Lease, LeaseRecord, lease_key, name_holder
from stages.store.open import open_store
from stages.store.options import StoreOptions
from tests.helpers.chain import Chain, finished_chain
from tests.helpers.stores.machine import checkpoint_of, write
from tests.helpers.support import assert_one_line_error
from tests.pipeline.store.test_shared_store import machine
from tests.stages.store.test_maintenance import age
from trainer.checkpoint.directory import CHECKPOINTS, whole_checkpoints

LABEL = "pretrain-phase1"
OTHER = Holder("other", "elsewhere", 17, "2026-11-21T03:04:05Z")


@pytest.fixture
def chain(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Chain:
    return finished_chain(tmp_path_factory).copy(tmp_path / "chain")


@pytest.fixture
def store(tmp_path: Path) -> Backend:
    return open_store(StoreOptions(url=Secret.address(str(tmp_path / "store"))))


def push_newest(store: Backend, directory: Path, fingerprint: str, holder: Holder) -> Lease:
    """Take the training's lease, and push the newest checkpoint in `directory`."""
    key = lease_key(LABEL, fingerprint)
    lease = Lease.acquire(store, key, holder, 3600.0, wait=lambda other: pytest.fail("it waits"))
    _, path = next(whole_checkpoints(directory / CHECKPOINTS))
    push_checkpoint(store, lease, f"{LABEL}-{fingerprint}", directory, path, alone=contextlib.nullcontext())
    return lease


def lease_of(store: Backend, fingerprint: str) -> LeaseRecord:
    return LeaseRecord.read(store, lease_key(LABEL, fingerprint))


def test_a_store_without_anything_is_not_called_intact(chain: Chain, tmp_path: Path) -> None:
    """A monitor with a wrong address would never notice."""
    done = chain.ask("store", "verify", "--Store-url", str(tmp_path / "nowhere"), status=35)
    assert_one_line_error(done, f"there is nothing in {tmp_path / 'nowhere'}; check [store] url", status=35)


@pytest.mark.parametrize("is_run", [True, False], ids=["the next run", "store push"])
def test_a_push_that_is_made_up_for_leaves_neither_checkpoints_nor_a_lease(
    chain: Chain, store: Backend, is_run: bool
) -> None:
    """The process that trained was killed while it pushed the complete training."""
    directory, url = chain.latest(LABEL), ("--Store-url", store.url)
    fingerprint = str(chain.manifest(LABEL)["fingerprint"])
    push_newest(store, directory, fingerprint, name_holder(directory))
    assert "not complete" in chain.ask("store", *url).stdout
    if is_run:
        chain.run("Pretrain", "--phase", "1", *url)
    else:
        chain.ask("store", "push", *url)
    record = lease_of(store, fingerprint)
    assert (record.holder, record.checkpoints, record.token) == (None, (), 1)
    assert not list(store.list("checkpoints/"))
    listing = chain.ask("store", *url).stdout
    assert f"{LABEL}-{fingerprint[:10]}" in listing
    assert "not complete" not in listing


def test_what_another_machine_left_of_a_complete_training_is_pruned_once_its_lease_is_over(
    chain: Chain, store: Backend, tmp_path: Path
) -> None:
    directory, url = chain.latest(LABEL), ("--Store-url", store.url)
    fingerprint = str(chain.manifest(LABEL)["fingerprint"])
    push_newest(store, directory, fingerprint, OTHER)
    chain.ask("store", "push", *url)
    assert lease_of(store, fingerprint).holder == OTHER
    assert "not complete" not in chain.ask("store", *url).stdout
    age(tmp_path / "store", 2, "checkpoints")
    assert "removed 0: 0 B freed" in chain.ask("store", "prune", "--keep", "9", "--remove", *url).stderr
    assert list(store.list("checkpoints/"))
    age(tmp_path / "store", 2, "leases")
    chain.ask("store", "prune", "--keep", "9", "--remove", *url)
    assert not list(store.list("checkpoints/"))


def test_a_checkpoint_in_the_store_is_named_before_a_run_resumes_from_it(store: Backend, tmp_path: Path) -> None:
    """A machine was lost; this one has nothing yet, then an older checkpoint, then a newer one."""
    fresh = machine(tmp_path / "fresh", tmp_path / "store")
    fingerprint = fresh.status()[LABEL]["fingerprint"]
    write(tmp_path / "lost" / CHECKPOINTS / "ckpt_5", checkpoint_of(5))
    push_newest(store, tmp_path / "lost", fingerprint, OTHER).release()

    def said(*words: str) -> tuple[str, str, str]:
        """By status, why and store plan."""
        plan = {line.split()[0]: line for line in fresh.ask("store", "plan", *words).stdout.splitlines()}
        why = fresh.ask("why", LABEL, *words, status=1).stdout
        return fresh.status(*words)[LABEL]["detail"], why, plan[LABEL]

    status, why, plan = said()
    assert status.endswith("; would continue from ckpt_5 in the store")
    assert "it was never started here; it would continue from ckpt_5 in the store; " in why
    assert plan.endswith(" made here from ckpt_5 in the store; pushed")
    assert not any("ckpt_5" in line for line in said("--Store-pull", "none"))
    here = fresh.work / f"{LABEL}-{fingerprint[:10]}"
    for step, origin in ((3, "ckpt_5 in the store"), (7, "step 7")):
        state = {"state.json": json.dumps({"step": step}).encode()}
        write(here / CHECKPOINTS / f"ckpt_{step}", {**checkpoint_of(step), **state})
        write(here, {"stage.json": json.dumps({"stage": "pretrain", "phase": 1, "fingerprint": fingerprint}).encode()})
        status, why, plan = said()
        assert f"resumes from {origin}" in status
        assert f"it was interrupted, and resumes from {origin}" in why
        assert ("from ckpt_5 in the store" in plan) == (step == 3)
