"""Removing from a store beside those who push to it and fetch from it, in any order of calls, with crashes."""

from __future__ import annotations

import contextlib
import hashlib
import random
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from common.errors import UserError
from common.secrets import Secret
from stages.directory.manifest import MANIFEST, Identity
from stages.store import maintenance, removals
from stages.store.backend import Backend
from stages.store.complete import fetch_stage, find_stage, push_stage
from stages.store.files import NotUsable
from stages.store.open import open_store
from stages.store.options import StoreOptions
from stages.store.records import stage_key
from tests.helpers.chain import wait_until
from tests.helpers.stores.interleaved import Actor, ActorsBackend, Shared
from tests.stages.store.test_complete import make

LABEL = "shard_dataset-phase1"
DAY = 86400.0
OLD, NEW = "old", "new"
IDENTITIES = {name: Identity("shard_dataset", 1, 1, {"name": name}) for name in (OLD, NEW)}
#: The new stage has some files that the old one has, too, under other names or the same.
FILES = {
    OLD: {"same": b"in both", "moved": b"elsewhere", "only": b"the old one"},
    NEW: {"same": b"in both", "to": b"elsewhere", "own": b"the new one"},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("made")
    return {name: make(place / name, identity, FILES[name]) for name, identity in IDENTITIES.items()}


@pytest.fixture
def store(made: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """A store with the old stage."""
    monkeypatch.setattr("os.fsync", lambda fd: None)
    monkeypatch.setattr(removals, "_POLL_S", 0.0)
    shared = Shared()
    run(Actor(shared, lambda backend: push_stage(backend, made[OLD], LABEL)))
    return shared.objects


def run(*actors: Actor) -> None:
    """Let the actors take turns until they end."""
    while running := [actor for actor in actors if not actor.is_over]:
        for actor in running:
            actor.step()


def shared_later(store: dict[str, bytes]) -> Shared:
    """The store after forty days."""
    shared = Shared(store)
    shared.now, shared.is_pruned, shared.knows_own_bytes = 40 * DAY, True, True
    return shared


def prune(backend: ActorsBackend) -> None:
    """Remove what is older than thirty days, as the command does."""
    contents = maintenance.read(backend)
    now = backend.actor.shared.now
    gone = maintenance.superfluous(contents, older_than_s=30 * DAY, most_bytes=None, newest=None, now=now)
    maintenance.remove(backend, contents, gone, now)


def mend(backend: ActorsBackend) -> None:
    """Find and remove what is damaged, as `store verify --remove` does."""
    contents = maintenance.read(backend)
    maintenance.remove_damaged(backend, contents, maintenance.verify(backend, contents, read_all=True))


def fetches(stage: str, directory: Path) -> Callable[[ActorsBackend], None]:
    """Fetch a stage if it is there. A directory is complete and right, or not complete."""

    def fetch(backend: ActorsBackend) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        record = find_stage(backend, LABEL, IDENTITIES[stage].fingerprint)
        if record is not None:
            with contextlib.suppress(NotUsable):
                fetch_stage(backend, record, directory)

    return fetch


def assert_right(directory: Path, stage: str) -> None:
    for name, data in FILES[stage].items():
        assert (directory / name).read_bytes() == data


def in_any_order(chance: random.Random, actors: list[Actor], *, crashes: float) -> list[bool]:
    """One call at a time; some actors die. Returns who ended alive."""
    alive = [True] * len(actors)
    while ready := [index for index, actor in enumerate(actors) if not actor.is_over]:
        index = chance.choice(ready)
        actors[index].shared.now += chance.choice((0.1, 10.0))
        if chance.random() < crashes:
            alive[index] = False
            actors[index].step(chance.choice(("dies before", "dies after")))
        else:
            actors[index].step()
    return alive


def sha256_key(data: bytes) -> str:
    sha256 = hashlib.sha256(data).hexdigest()
    return f"objects/{sha256[:2]}/{sha256}"


def is_whole(shared: Shared, stage: str, place: Path) -> bool:
    """Whether the store has the stage, all of it."""
    run(Actor(shared, fetches(stage, place)))
    if (place / MANIFEST).exists():
        assert_right(place, stage)
    return (place / MANIFEST).exists()


@pytest.mark.parametrize("crashes", [0.0, 0.05])
def test_a_push_beside_a_removal_ends_whole(
    store: dict[str, bytes], made: dict[str, Path], tmp_path: Path, crashes: float
) -> None:
    """Two machines push the new stage, which shares files with the one that is removed; another fetches the old one.
    Whoever has pushed can rely on it, unless it was told that the push failed. What died is started again."""
    outcomes = set()
    for seed in range(60):
        chance, shared, place = random.Random(seed), shared_later(store), tmp_path / "place"
        copies = [shutil.copytree(made[NEW], place / f"new {number}") for number in range(2)]
        pushed = [False, False]

        def push(number: int, copies: list[Path] = copies, pushed: list[bool] = pushed) -> Callable[..., None]:
            def work(backend: ActorsBackend) -> None:
                with contextlib.suppress(UserError):  # "keeps losing files …; run the same again"
                    push_stage(backend, copies[number], LABEL)
                    pushed[number] = True

            return work

        actors = [Actor(shared, one) for one in (push(0), push(1), prune, fetches(OLD, place / "old"))]
        alive = in_any_order(chance, actors, crashes=crashes)
        if (place / "old" / MANIFEST).exists():
            assert_right(place / "old", OLD)
        whole = is_whole(shared, NEW, place / "look")
        outcomes.add((whole, (place / "old" / MANIFEST).exists()))
        if not crashes:
            assert whole == any(pushed), seed
            assert all(pushed) or not whole, seed
        if alive[2]:
            assert not is_whole(shared, OLD, place / "gone"), seed
            assert sha256_key(FILES[OLD]["only"]) not in shared.objects, seed
        run(Actor(shared, push(0)))
        assert is_whole(shared, NEW, place / "again"), seed
        shutil.rmtree(place)
    assert {True, False} == {old for _, old in outcomes}, "the old stage is to be fetched in time, and too late"
    Actor.end_all()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Backend:
    monkeypatch.setattr(removals, "_POLL_S", 0.0)
    return open_store(StoreOptions(url=Secret.address(str(tmp_path / "store"))))


def test_a_removal_that_died_holds_nobody_up_for_ever(folder: Backend, made: dict[str, Path]) -> None:
    announcement = removals.announced(folder)
    announcement.__enter__()
    assert len(list(folder.list("removals/"))) == 1
    push_stage(folder, made[NEW], LABEL)
    assert find_stage(folder, LABEL, IDENTITIES[NEW].fingerprint) is not None
    assert not list(folder.list("removals/"))


def test_a_removal_that_ends_between_two_looks_was_one(
    folder: Backend, made: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is listed, and gone when it is read: what it removed has to be looked for all the same."""
    with removals.announced(folder):
        listed = list(folder.list("removals/"))
    looks = iter([listed, []])
    monkeypatch.setattr(folder, "list", lambda prefix: next(looks))
    assert removals.await_removals(folder)


def test_a_removal_with_a_slow_part_is_not_taken_for_dead(
    folder: Backend, made: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever pushed meanwhile would rely on files that are about to go."""
    monkeypatch.setattr(removals, "_RENEW_S", 0.01)
    monkeypatch.setattr(removals, "_POLL_S", 0.05)
    looks, read = [], folder.read

    def look(key: str) -> tuple[bytes, str]:
        looks.append(key)
        return read(key)

    monkeypatch.setattr(folder, "read", look)
    with ThreadPoolExecutor(1) as threads:
        with removals.announced(folder) as go_on:
            waiting = threads.submit(removals.await_removals, folder)
            # More looks than those for which a dead one's announcement is respected.
            wait_until(lambda: waiting.done() or len(looks) > 1.5 * removals._PATIENCE)
            assert not waiting.done()
            go_on()
        assert waiting.result(60)


def test_records_that_rely_on_removed_files_go_even_if_the_removal_is_taken_for_dead(
    folder: Backend, made: dict[str, Path]
) -> None:
    push_stage(folder, made[OLD], LABEL)
    keys = [entry.key for entry in folder.list("objects/")]
    push_stage(folder, made[NEW], LABEL)
    calls = iter([None, UserError("others push again")])

    def go_on() -> None:
        if (error := next(calls)) is not None:
            raise error

    known = {stage_key(LABEL, IDENTITIES[OLD].fingerprint)}
    with pytest.raises(UserError, match="others push again"):
        removals.remove_files(folder, keys, known, go_on)
    assert find_stage(folder, LABEL, IDENTITIES[NEW].fingerprint) is None, "it shares files with the old one"


def test_a_removal_that_was_taken_for_dead_removes_nothing_more(folder: Backend, made: dict[str, Path]) -> None:
    push_stage(folder, made[OLD], LABEL)
    before = maintenance.read(folder)
    with removals.announced(folder) as go_on:
        go_on()
        push_stage(folder, made[NEW], LABEL)
        with pytest.raises(UserError, match="took so long that others push again; run the same command again"):
            go_on()
    assert maintenance.read(folder).files.keys() >= before.files.keys()


def test_a_push_beside_a_search_for_damage_ends_whole(
    store: dict[str, bytes], made: dict[str, Path], tmp_path: Path
) -> None:
    """A file that both stages need has other bytes of the same length: the push finds it there."""
    poisoned, mended = sha256_key(FILES[OLD]["same"]), 0
    for seed in range(40):
        chance, shared, place = random.Random(seed), shared_later(store), tmp_path / "place"
        shared.objects[poisoned] = b"!" * len(shared.objects[poisoned])
        copy = shutil.copytree(made[NEW], place / "new")
        actors = [Actor(shared, lambda backend, copy=copy: push_stage(backend, copy, LABEL)), Actor(shared, mend)]
        in_any_order(chance, actors, crashes=0.0)
        mended += is_whole(shared, NEW, place / "look")
        run(Actor(shared, mend))
        run(Actor(shared, lambda backend, copy=copy: push_stage(backend, copy, LABEL)))
        assert is_whole(shared, NEW, place / "again"), seed
        shutil.rmtree(place)
    assert 0 < mended < 40, "some pushes are to notice it themselves"
