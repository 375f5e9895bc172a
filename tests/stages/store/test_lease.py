"""Leases: one machine makes a stage, and whoever has lost its lease changes nothing, whatever happens in between."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from common.errors import LeaseLost, UserError
from common.secrets import Secret
from stages.store.backend import Backend
from stages.store.checkpoints import fetch_checkpoint, forget_checkpoints, push_checkpoint
from stages.store.lease import Holder, Lease, LeaseRecord, StoredCheckpoint, name_holder
from stages.store.open import open_store
from stages.store.options import StoreOptions
from stages.store.records import StoredFile
from tests.helpers.stores.interleaved import Actor, ActorsBackend, Fate, Shared
from tests.helpers.stores.machine import LEASE_S, Machine, checkpoint_of, write

KEY, NAME = Shared.lease_key, Shared.name
FAILURES: list[Fate] = ["dies before", "dies after", "refused", "answer lost"]


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """In memory where the system allows it, and without fsync: nothing here depends on either."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        yield Path(name)
        Actor.end_all()


def finish(shared: Shared, *actors: Actor) -> None:
    """Let the actors take turns until they end."""
    until = shared.now + 5000.0
    while running := [actor for actor in actors if not actor.is_over]:
        assert shared.now < until, f"they wait for ever: {[actor.pending for actor in running]}"
        for actor in running:
            shared.now += 1.0
            actor.step()


def assert_a_new_machine_goes_on(shared: Shared, place: Path, actors: list[Actor]) -> None:
    """Everything dies; another machine gets the lease, and the newest checkpoint, byte for byte."""
    for actor in actors:
        if not actor.is_over:
            actor.step("dies before")
    machine = Machine(shared, place)

    def work(backend: ActorsBackend) -> None:
        machine.fetch(backend, machine.acquire(backend).record)

    listed = [int(one["name"].removeprefix("ckpt_")) for one in shared.record["checkpoints"]]
    finish(shared, machine.start(work))
    assert machine.step == max(listed, default=0)


@pytest.mark.parametrize("seed", range(5))
def test_no_order_of_calls_and_crashes_breaks_the_rules(seed: int, disk: Path) -> None:
    """The rules are `Shared.check`, after every call. Steps take from 0.1 s to longer than a lease lasts."""
    complete = taken = 0
    for number in range(40):
        chance, place = random.Random(1000 * seed + number), disk / str(number)
        shared = Shared()
        shared.knows_own_bytes = chance.random() < 0.5
        machines = [
            Machine(shared, place / str(index), 4, chance.randint(1, 4), chance.random() < 0.6, 1e5 * chance.random())
            for index in range(chance.choice((2, 3)))
        ]
        actors = [machine.start() for machine in machines]
        paused = [0] * len(machines)
        for step in range(150):
            ready = [index for index, actor in enumerate(actors) if not actor.is_over and paused[index] <= step]
            shared.now += chance.choice((0.1, 0.1, 1.0, 10.0)) if ready and chance.random() < 0.97 else LEASE_S
            if not ready:
                continue
            index = chance.choice(ready)
            if chance.random() < 0.05:
                paused[index] = step + chance.randint(5, 80)
                continue
            actors[index].step(fate := chance.choice(FAILURES) if chance.random() < 0.06 else "made")
            if fate.startswith("dies"):
                if chance.random() < 0.3:
                    machines[index] = dataclasses.replace(machines[index], directory=place / f"new {step}")
                actors[index] = machines[index].start()
        complete += any(key.startswith("stages/") for key in shared.objects)
        taken += len(shared.taken)
        assert_a_new_machine_goes_on(shared, place / "last", actors)
    assert 0 < complete < 40, "some of them are to end before the stage is complete"
    assert taken > 120, "leases are to be taken over"


@pytest.fixture
def begun(disk: Path) -> dict[str, bytes]:
    """A store with two checkpoints of an earlier lease."""
    shared = Shared()
    finish(shared, Machine(shared, disk / "begun", pushes=3).start())
    return shared.objects


def calls(begun: dict[str, bytes], directory: Path) -> list[str]:
    """The calls of a machine that has the store to itself."""
    shared, found = Shared(begun), []
    actor = Machine(shared, directory, pulls=False, pushes=1).start()
    while not actor.is_over:
        found.append(actor.pending.split()[0])
        actor.step()
    return found


@pytest.mark.slow
def test_a_machine_may_stop_at_any_call_while_another_is_at_any_other(begun: dict[str, bytes], disk: Path) -> None:
    """One stops, the other takes the lease and stops, the first runs to its end, then the second. Calls of one kind in
    a row count as one: they can be in any order."""
    kinds = calls(begun, disk / "alone")
    stops = [index for index, kind in enumerate(kinds) if index < 2 or kind != kinds[index - 1]]
    for first in stops:
        for second in (stop for stop in stops if kinds[stop] in ("download", "write", "upload", "delete")):
            shared, place = Shared(begun), disk / f"{first}-{second}"
            one, two = (Machine(shared, place / name, pulls=False, pushes=1).start() for name in ("one", "two"))
            for _ in range(first):
                one.step()
            had = len(shared.taken)
            while len(shared.taken) == had:
                shared.now += LEASE_S
                two.step()
            for _ in range(second - 2):
                if not two.is_over:
                    two.step()
            finish(shared, one)
            finish(shared, two)


@pytest.mark.parametrize("fate", FAILURES)
def test_a_machine_may_fail_at_any_call_and_come_back(fate: Fate, begun: dict[str, bytes], disk: Path) -> None:
    for number in range(len(calls(begun, disk / "alone"))):
        shared, place = Shared(begun), disk / str(number)
        one, two = (Machine(shared, place / name, pushes=1) for name in ("one", "two"))
        actor = one.start()
        for _ in range(number):
            actor.step()
        actor.step(fate)
        finish(shared, two.start(), one.start() if actor.is_over else actor)
        assert shared.record["holder"] is None
        assert any(key.startswith("stages/") for key in shared.objects)
        assert_a_new_machine_goes_on(shared, place / "last", [])


def test_somebody_finishes_and_the_others_fetch_it(disk: Path) -> None:
    for seed in range(10):
        chance, shared = random.Random(seed), Shared()
        machines = [Machine(shared, disk / f"{seed}-{index}", clock_s=1e4 * index) for index in range(3)]
        running = [machine.start() for machine in machines]
        while running := [actor for actor in running if not actor.is_over]:
            shared.now += chance.uniform(0.0, 1.0)
            assert shared.now < 1000.0
            chance.choice(running).step()
        assert shared.taken == [1, 2, 3], "nobody has lost a lease"
        assert not [key for key in shared.objects if key.startswith("checkpoints/")]
        assert {(machine.directory / "weights").read_bytes() for machine in machines} == {b"trained"}


@pytest.fixture
def store(tmp_path: Path) -> Backend:
    return open_store(StoreOptions(url=Secret.address(str(tmp_path / "store"))))


def holder(name: str) -> Holder:
    return Holder(name, f"host-{name}", 1, "2026-01-01T00:00:00Z")


def taken(store: Backend, name: str, **options: Any) -> Lease:
    """The lease, which must be free: nobody waits for it."""
    return Lease.acquire(store, KEY, holder(name), LEASE_S, wait=lambda other: pytest.fail("it waits"), **options)


def waited(
    store: Backend,
    beats: Mapping[int, Callable[[], None]] = MappingProxyType({}),
    start: float = 0.0,
    who: Holder | None = None,
) -> int:
    """Acquire for `who` (left out: b), who looks every second on a clock that begins at `start`; returns the seconds
    until it has the lease. `beats`: what happens at which second."""
    now = 0

    def wait(other: Holder) -> None:
        nonlocal now
        assert other.host == "host-a"
        now += 1
        beats.get(now, lambda: None)()

    Lease.acquire(store, KEY, who or holder("b"), LEASE_S, wait=wait, clock=lambda: start + now)
    return now


def test_whoever_waits_is_told_for_whom_and_may_give_up(store: Backend) -> None:
    taken(store, "a")

    def wait(other: Holder) -> None:
        raise InterruptedError(str(other))

    with pytest.raises(InterruptedError, match="process 1 on host-a, since 2026-01-01"):
        Lease.acquire(store, KEY, holder("b"), LEASE_S, wait=wait)


def test_a_turn_is_over_after_its_time_without_a_beat(store: Backend) -> None:
    lease = taken(store, "a")
    assert waited(store, {30: lease.renew, 80: lease.renew}) == 80 + LEASE_S + 1


@pytest.mark.parametrize("hours", [-1000.0, 0.0, 7.5])
def test_clocks_that_are_hours_apart_make_no_difference(
    hours: float, store: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The waiting machine's clock is shifted; wall clocks, which jump all the time here, do not matter."""
    jumps = random.Random(1)
    monkeypatch.setattr(time, "time", lambda: jumps.uniform(0.0, 2e9))
    lease = taken(store, "a", clock=lambda: 1e6)
    assert waited(store, {10: lease.renew}, start=3600 * hours) == 10 + LEASE_S + 1


def test_a_killed_process_takes_its_turn_back_at_once(store: Backend, tmp_path: Path) -> None:
    tokens = []
    for _ in range(2):
        mine = name_holder(tmp_path)
        lease = Lease.acquire(store, KEY, mine, LEASE_S, wait=lambda other: pytest.fail("waits for itself"))
        tokens.append(lease.token)
    assert tokens == [1, 2]
    with pytest.raises(LeaseLost):
        Lease.resume(store, KEY, mine.id, 1)


def test_a_copy_of_the_directory_on_another_host_waits(
    store: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As two machines that were started from one image: neither takes a living one's turn."""
    (tmp_path / "work").mkdir()
    monkeypatch.setattr(socket, "gethostname", lambda: "host-a")
    first = name_holder(tmp_path / "work")
    lease = Lease.acquire(store, KEY, first, LEASE_S, wait=lambda other: pytest.fail("it waits"))
    shutil.copytree(tmp_path / "work", tmp_path / "copy")
    monkeypatch.setattr(socket, "gethostname", lambda: "host-b")
    second = name_holder(tmp_path / "copy")
    assert first.id == second.id
    assert waited(store, {30: lease.renew}, who=second) == 30 + LEASE_S + 1
    with pytest.raises(LeaseLost, match="process .* on host-b"):
        lease.renew()


def test_another_process_of_the_same_turn_goes_on_with_it(store: Backend) -> None:
    lease = taken(store, "a")
    lease.renew()
    Lease.resume(store, KEY, "a", lease.token).renew()
    lease.renew()
    assert LeaseRecord.read(store, KEY).beat == 3


LISTED = StoredCheckpoint("ckpt_1", 1, (StoredFile("model", 1, "0" * 64),), ())


@pytest.mark.parametrize(
    "use", [Lease.renew, Lease.release, lambda lease: lease.keep((LISTED,))], ids=["renew", "release", "keep"]
)
@pytest.mark.parametrize("is_released", [False, True])
def test_a_lost_turn_changes_nothing(use: Callable[[Lease], None], is_released: bool, store: Backend) -> None:
    lease = taken(store, "a")
    waited(store)
    if is_released:
        Lease.resume(store, KEY, "b", 2).release()
    before = store.read(KEY)
    with pytest.raises(LeaseLost, match="has lost its lease: " + ("it was given" if is_released else "process 1 on")):
        use(lease)
    assert store.read(KEY) == before


def test_a_turn_that_is_handed_over_is_taken_at_once_with_its_checkpoints(store: Backend) -> None:
    lease = taken(store, "a")
    lease.keep((LISTED,))
    lease.release()
    after = taken(store, "b")
    assert (after.token, after.record.checkpoints) == (2, (LISTED,))


def test_a_damaged_record_is_an_error_that_says_what_to_do(store: Backend, tmp_path: Path) -> None:
    taken(store, "a")
    path = tmp_path / "store" / KEY
    path.write_bytes(path.read_bytes().replace(b"host-a", b"host-c"))
    with pytest.raises(UserError, match=r"is damaged \(.*\); remove it and run the same again$") as error:
        taken(store, "b")
    assert "\n" not in str(error.value)
    path.unlink()
    assert taken(store, "b").token == 1


def test_a_late_cleaning_leaves_what_later_turns_have_brought(store: Backend, tmp_path: Path) -> None:
    """A machine cleans up after a complete training run, and pauses midway for longer than its lease lasts."""
    late = taken(store, "a")

    class Slow(contextlib.AbstractContextManager[None]):
        def __exit__(self, *exception: object) -> None:
            waited(store)
            path = tmp_path / "run/checkpoints/ckpt_1"
            write(path, checkpoint_of(1))
            lease = Lease.resume(store, KEY, "b", 2)
            push_checkpoint(store, lease, NAME, tmp_path / "run", path, alone=contextlib.nullcontext())

    forget_checkpoints(store, late, NAME, Slow())
    machine = Machine(Shared(), tmp_path / "there")
    assert fetch_checkpoint(store, LeaseRecord.read(store, KEY), NAME, machine.directory, -1) is not None
    assert machine.step == 1
