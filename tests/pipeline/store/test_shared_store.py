"""The chain on machines that share a store and nothing else: each has a work directory of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import torch
from safetensors.torch import save_file

from common.errors import LeaseLost
from common.files import read_json
from common.secrets import Secret
from pipeline.launchers.base import Detached
from pipeline.store import background
from pipeline.store.shared import SharedStage, SharedStore
from stages.directory.attempts import read
from stages.directory.manifest import Identity, StageDirectory
from stages.store.backend import Conflict
from stages.store.lease import Holder, Lease, LeaseRecord, lease_key
from stages.store.open import open_store
from stages.store.options import StoreOptions
from tests.helpers.chain import LUIGI, STAGES, Chain, wait_until, write_corpus
from tests.helpers.stores.machine import checkpoint_of, write
from tests.helpers.support import ROOT, assert_same_bytes, metrics
from trainer.checkpoint.directory import CHECKPOINTS

Start = Callable[..., "subprocess.Popen[bytes]"]
STORED = {stage for stage in STAGES if not stage.startswith("precompile")}
#: Enough steps for a kill in the middle.
LONG = ("--Phase1-max-steps", "60", "--Phase1-ckpt-interval-steps", "5")


def machine(directory: Path, store: Path, extra: str = "", *, lease_s: int = 3) -> Chain:
    """A machine with the same text and configuration, and a work directory of its own."""
    directory.mkdir(parents=True, exist_ok=True)
    write_corpus(directory / "corpus.txt")
    return Chain(directory, f"\n[store]\nurl = {store}\nlease_s = {lease_s}\n{extra}")


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts luigi on a machine; whatever is left of it is killed afterwards."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(chain: Chain, *words: str, **env: str) -> subprocess.Popen[bytes]:
        started.append(chain.start(*words, **env))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """A machine that has made everything."""
    directory = tmp_path_factory.mktemp("machines")
    chain = machine(directory / "first", directory / "store")
    chain.run("BertPhase2")
    return chain


def stored(store: Path) -> set[str]:
    return {path.parent.name for path in (store / "stages").rglob("*.json")}


@pytest.mark.slow
def test_everything_but_compiled_graphs_is_in_the_store(first: Chain) -> None:
    store = first.directory.parent / "store"
    assert stored(store) == STORED
    assert "is intact" in first.ask("store", "verify", "--read").stdout
    left = [path for path in (store / "checkpoints").rglob("*") if path.is_file()]
    assert not left, "checkpoints of complete trainings are removed"
    objects = [path for path in (store / "objects").rglob("*") if path.is_file()]
    assert len(objects) > 20
    assert not [path for path in objects if is_pickle(path.read_bytes())]


def is_pickle(data: bytes) -> bool:
    """Or what torch.save writes. A safetensors file has its header's length in the first bytes, and JSON after it."""
    return data.startswith(b"PK\x03\x04") or (data[:1] == b"\x80" and data[1:2] <= b"\x05" and data[8:9] != b"{")


def test_pickles_are_told_apart(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(3)}, tmp_path / "a.pt")
    save_file({str(n): torch.zeros(3) for n in range(30)}, tmp_path / "a.safetensors")
    assert is_pickle((tmp_path / "a.pt").read_bytes())
    assert is_pickle(pickle.dumps({"a": 1}))
    assert not is_pickle((tmp_path / "a.safetensors").read_bytes())


@pytest.mark.slow
def test_a_finished_chain_is_fetched_and_nothing_is_made(first: Chain, tmp_path: Path) -> None:
    other = machine(tmp_path / "other", first.directory.parent / "store")
    rows = other.status()
    assert {stage for stage, row in rows.items() if "in the store" in row["detail"]} == {
        "merge_shards", "evaluate", "report",
    }  # fmt: skip
    assert "merge_shards would be fetched: it is in the store" in other.ask("why", "BertPhase2", status=1).stdout
    assert "fetched: " in other.ask("store", "plan").stdout
    program = "import luigi; luigi.run(['BertPhase2', '--module', 'pipeline'])\n"
    done = other.without_torch(program)
    assert "is not here, but the model made from it is" in done.stderr
    assert {path.name.split("-")[0] for path in other.work.glob("*-*")} == {"merge_shards", "evaluate", "report"}
    for stage in ("merge_shards", "evaluate", "report"):
        assert other.manifest(stage) == first.manifest(stage)
        other.ask("why", stage, "--verify")
    again = other.run("BertPhase2")
    assert "fetched" not in again.stderr
    # Its training, fetched when it is asked for, shows when and where it was trained.
    other.run("Pretrain", "--phase", "1")
    assert other.manifest("pretrain-phase1") == first.manifest("pretrain-phase1")


@pytest.mark.slow
def test_what_follows_a_fetched_stage_is_made_from_it(first: Chain, tmp_path: Path) -> None:
    """For each stage in turn: the store has it and what it is made from, and nothing that is made from it."""
    store = tmp_path / "store"
    shutil.copytree(first.directory.parent / "store", store)
    for index, stage in enumerate(made := ["evaluate", "merge_shards", "pretrain-phase2", "convert_checkpoint"]):
        shutil.rmtree(store / "stages" / stage)
        shutil.rmtree(store / "stages" / "report", ignore_errors=True)
        other = machine(tmp_path / f"other-{index}", store, "push = none\n")
        done = other.run("BertPhase2")
        for one in made[: index + 1]:
            assert f"{one}: fetched" not in done.stderr
            assert other.manifest(one)["outputs"] == first.manifest(one)["outputs"], one
        shutil.rmtree(other.directory)
    assert "pretrain-phase1: fetched" in done.stderr


NO_TORCH = """
import os, sys
class Refused:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            with open(os.environ["IMPORTED_TORCH"], "a") as file:
                file.write(" ".join(sys.orig_argv) + "\\n")
            raise ImportError("torch is refused")
sys.meta_path.insert(0, Refused())
"""


def test_a_finished_chain_is_fetched_where_no_process_can_import_torch(first: Chain, tmp_path: Path) -> None:
    other = machine(tmp_path / "other", first.directory.parent / "store")
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(NO_TORCH)
    here = {"PYTHONPATH": str(tmp_path / "site"), "IMPORTED_TORCH": str(tmp_path / "imported")}
    done = subprocess.run(
        [sys.executable, *LUIGI, "BertPhase2"], cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, **here, "LUIGI_CONFIG_PATH": str(other.config)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "imported").exists(), (tmp_path / "imported").read_text()
    assert other.manifest("merge_shards") == first.manifest("merge_shards")
    assert not list(other.work.glob("*/stage.log")), "a stage's command was started"
    refused = subprocess.run([sys.executable, "-c", "import torch"], env={**os.environ, **here}, check=False)
    assert refused.returncode
    assert (tmp_path / "imported").exists()


def test_what_is_poisoned_is_made_here_with_the_same_bytes(first: Chain, tmp_path: Path) -> None:
    shutil.copytree(first.directory.parent / "store", tmp_path / "store")
    outputs = first.manifest("shard_dataset-phase1")["outputs"]
    for output in outputs:  # type: ignore[attr-defined]
        path = tmp_path / "store/objects" / output["sha256"][:2] / output["sha256"]
        path.write_bytes(path.read_bytes()[::-1])
    other = machine(tmp_path / "other", tmp_path / "store")
    assert "its sha256 is not its name's" in other.ask("store", "verify", "--read", status=1).stdout
    done = other.run("ShardDataset", "--phase", "1")
    assert "bytes do not match the sha256; it is made here instead" in done.stderr
    assert other.manifest("shard_dataset-phase1")["outputs"] == outputs
    # What was made here has replaced what was poisoned, for all other machines too.
    assert "is intact" in other.ask("store", "verify", "--read").stdout


@pytest.mark.slow
def test_what_was_removed_is_pushed_again_when_asked(first: Chain, tmp_path: Path) -> None:
    store = tmp_path / "store"
    other = machine(tmp_path / "other", store)
    other.run("ShardDataset", "--phase", "1")
    assert "not in the store" not in other.ask("store", "plan").stdout
    for path in (store / "objects").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    said = other.ask("store", "verify", "--remove", status=1).stdout
    (line,) = (line for line in said.splitlines() if line.startswith("removed, with the records of "))
    assert ("shard_dataset-phase1-" in line, "tokenize_corpus-" in line) == (True, True)
    other.run("ShardDataset", "--phase", "1")
    assert not stored(store), "pushed once already: a run leaves alone what was removed"
    assert other.ask("store", "plan").stdout.count("complete here; not in the store any more (store push)") == 2
    pushed = other.ask("store", "push")
    assert (pushed.stdout.count(" files, "), pushed.stderr.count(": 100%|")) == (2, 2)
    verified = other.ask("store", "verify", "--read")
    assert ("is intact" in verified.stdout, ": 100%|" in verified.stderr) == (True, True)
    assert stored(store) == {"tokenize_corpus", "shard_dataset-phase1"}
    assert not other.ask("store", "push").stdout


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_machine_that_is_lost_with_its_disk_is_continued_by_another(
    start: Start, tmp_path: Path, workers: int
) -> None:
    """Killed anywhere in phase 1, its work directory gone: another machine resumes from a checkpoint in the store and
    ends with the bytes of an undisturbed training."""
    layout = ("--Cluster-nproc-per-node", str(workers), "--Cluster-tensor-parallel-size", str(workers))
    undisturbed = machine(tmp_path / "undisturbed", Path("unused"), "push = none\npull = none\n")
    undisturbed.run("Pretrain", "--phase", "1", *LONG, *layout)
    lost = machine(tmp_path / "lost", tmp_path / "store")
    # Its training gets no further than step 30, however long the first push takes.
    process = start(lost, "Pretrain", "--phase", "1", *LONG, *layout, FAILPOINT="step:30.0", FAILPOINT_ACTION="stop")
    wait_until(lambda: len(_lease(tmp_path / "store").get("checkpoints", ())) > 0)
    lost.lose(process)
    killed_at = time.time()
    shutil.rmtree(lost.work)
    other = machine(tmp_path / "other", tmp_path / "store")
    done = other.run("Pretrain", "--phase", "1", *LONG, *layout)
    assert "pretrain-phase1: process " in done.stderr  # waited for the lost one's lease
    assert "pretrain-phase1: resumes from ckpt_" in done.stderr
    assert "tokenize_corpus: fetched" in done.stderr or "shard_dataset-phase1: fetched" in done.stderr
    last = "checkpoints/ckpt_60"
    assert_same_bytes(other.latest("pretrain-phase1") / last, undisturbed.latest("pretrain-phase1") / last)
    lines = (other.latest("pretrain-phase1") / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    # The time line begins on the machine that was lost.
    attempts = read(other.latest("pretrain-phase1"), running=False, complete=True)
    assert [attempt.how for attempt in attempts] == ["killed", "complete"]
    assert attempts[0].started < killed_at < attempts[1].started
    assert attempts[0].ended <= killed_at
    spent = other.manifest("pretrain-phase1")["counts"]["goodput"]["seconds"]  # type: ignore[index]
    assert spent["down"] > 3, "the lease of the lost machine"
    assert sum(spent.values()) == pytest.approx(attempts[1].ended - attempts[0].started, abs=0.1)
    assert steps == sorted(set(steps)) == list(range(1, 61)), "each step once, those of the lost one too"


@pytest.mark.slow
def test_an_interrupted_run_leaves_its_newest_checkpoint_in_the_store(start: Start, tmp_path: Path) -> None:
    chain = machine(tmp_path / "first", tmp_path / "store")
    process = start(chain, "Pretrain", "--phase", "1", "--Phase1-max-steps", "100000")
    wait_until(lambda: "LOG" in _log(chain))
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 75, _log(chain)
    (directory,) = chain.work.glob("pretrain-phase1-*")
    newest = max(int(path.name.removeprefix("ckpt_")) for path in (directory / "checkpoints").iterdir())
    record = _lease(tmp_path / "store")
    assert record["checkpoints"][-1]["name"] == f"ckpt_{newest}"
    assert record["holder"] is None, "another machine goes on at once"
    listing = chain.ask("store").stdout
    assert f"ckpt_{newest}" in listing
    assert "nobody is making it now" in listing
    # Who pulls nothing begins at the first step, and pushes what is newer than what is there.
    other = machine(tmp_path / "second", tmp_path / "store")
    process = start(other, "Pretrain", "--phase", "1", "--Phase1-max-steps", "100000", "--Store-pull", "none")
    wait_until(lambda: any(len(metrics(path.parent)) > 2 for path in other.work.glob("*/metrics.jsonl")))
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 75, _log(other)
    (directory,) = other.work.glob("pretrain-phase1-*")
    assert metrics(directory)[0]["step"] == 1
    assert f"has a checkpoint of step {newest}, which [store] pull = none leaves there" in _log(other)
    stored = int(_lease(tmp_path / "store")["checkpoints"][-1]["name"].removeprefix("ckpt_"))
    assert stored == max(newest, *(int(path.name.removeprefix("ckpt_")) for path in directory.glob("checkpoints/*")))


@pytest.mark.slow
def test_of_two_machines_that_train_the_same_one_waits_and_fetches(start: Start, tmp_path: Path) -> None:
    # A lease that outlasts any pause of a busy machine.
    machines = [machine(tmp_path / name, tmp_path / "store", lease_s=30) for name in ("a", "b")]
    processes = [start(chain, "Pretrain", "--phase", "1") for chain in machines]
    assert [process.wait() for process in processes] == [0, 0], [_log(chain) for chain in machines]
    logs = [_log(chain) for chain in machines]
    for stage in ("tokenize_corpus", "shard_dataset-phase1", "pretrain-phase1"):
        assert sum(f"{stage}: fetched from" in log for log in logs) == 1, "\n".join(logs)
    assert any("is making it; waiting" in log for log in logs)


@pytest.mark.parametrize("reason", [KeyboardInterrupt, pytest.param(Detached, marks=pytest.mark.slow)])
def test_the_lease_lasts_until_the_last_checkpoint_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: type[BaseException]
) -> None:
    """Each of its files takes longer than the lease lasts, and another machine waits for that lease. A job that goes on
    training stays this machine's."""
    store, stage = store_and_stage(tmp_path)
    upload, key = store.backend.upload, lease_key(stage.label, stage.fingerprint)
    taken: list[Lease] = []

    def slow(*words: Any) -> None:
        time.sleep(5)
        upload(*words)

    def another() -> None:
        backend, holder = open_store(store.options), Holder("other", "elsewhere", 0, "now")
        taken.append(Lease.acquire(backend, key, holder, 2.0, wait=lambda _: time.sleep(0.05)))

    monkeypatch.setattr(store.backend, "upload", slow)
    other = threading.Thread(target=another, daemon=True)
    with StageDirectory.begin(stage.directory, lambda: Identity("pretrain", 1, 1, {})):
        with contextlib.suppress(reason), store.making(stage, attached=False):
            other.start()
            write(stage.directory / CHECKPOINTS / "ckpt_1", checkpoint_of(1))
            raise reason
        holder = LeaseRecord.read(store.backend, key).holder
    assert reason is KeyboardInterrupt or (holder is not None and holder.id != "other")
    other.join(60)
    assert [one.name for one in taken[0].record.checkpoints] == ["ckpt_1"]


def test_a_companion_that_dies_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else checkpoints would no longer reach the store, and a lost machine would lose its work."""
    monkeypatch.setattr(background, "_AGAIN_S", 0.1)
    store, stage = store_and_stage(tmp_path)

    def beside() -> list[psutil.Process]:
        found = []
        for one in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):  # a zombie has no command line, either
                if "accompany" in one.cmdline():
                    found.append(one)
        return found

    with (
        StageDirectory.begin(stage.directory, lambda: Identity("pretrain", 1, 1, {})),
        contextlib.suppress(KeyboardInterrupt),
        store.making(stage, attached=False),
    ):
        wait_until(lambda: len(beside()) == 1)
        (first,) = beside()
        first.kill()
        wait_until(lambda: any(one.pid != first.pid for one in beside()))
        write(stage.directory / CHECKPOINTS / "ckpt_1", checkpoint_of(1))
        wait_until(lambda: bool(LeaseRecord.read(store.backend, lease_key(stage.label, stage.fingerprint)).checkpoints))
        raise KeyboardInterrupt
    assert not beside()


def test_what_the_parent_pushes_no_forked_process_pushes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """luigi's worker processes are forked when many complete stages may wait to be pushed at the end."""
    done = multiprocessing.get_context("fork").Process(target=background._await_pushes)
    with monkeypatch.context() as patch:
        patch.setattr(background, "_unpushed", {tmp_path: (StoreOptions(url=Secret.address(str(tmp_path / "s"))), "a")})
        patch.setattr(background, "_pending", [(cast("subprocess.Popen[bytes]", None), "b", tmp_path)])
        done.start()
    done.join(60)
    assert done.exitcode == 0
    assert not list(tmp_path.iterdir())


def test_a_companion_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_PATIENCE_S", 0.2)
    store, stage = store_and_stage(tmp_path)
    with (
        StageDirectory.begin(stage.directory, lambda: Identity("pretrain", 1, 1, {})),
        contextlib.suppress(KeyboardInterrupt),
        store.making(stage, attached=False),
    ):
        beside: list[psutil.Process] = []

        def has_begun() -> bool:
            """Until then it has the command line of this process."""
            beside[:] = [child for child in psutil.Process().children() if "accompany" in child.cmdline()]
            return len(beside) == 1

        wait_until(has_begun)
        beside[0].suspend()
        raise KeyboardInterrupt
    assert not beside[0].is_running()


def store_and_stage(directory: Path) -> tuple[SharedStore, SharedStage]:
    """A training of phase 1, and a store with a lease of two seconds."""
    settings = cast(Any, SimpleNamespace(push="all", pull="all"))
    store = SharedStore(settings, StoreOptions(url=Secret.address(str(directory / "store")), lease_s=2.0))
    fingerprint = Identity("pretrain", 1, 1, {}).fingerprint
    return store, SharedStage("pretrain-phase1", fingerprint, directory / "stage", "models", resumes=True, siblings=())


def test_a_turn_that_is_lost_before_training_ends_the_run_alike(tmp_path: Path) -> None:
    """While it fetches, or records what was made, no training's signal handler is installed."""
    store, stage = store_and_stage(tmp_path)
    with StageDirectory.begin(stage.directory, lambda: Identity("pretrain", 1, 1, {})):
        before = signal.getsignal(signal.SIGTERM)
        with pytest.raises(LeaseLost, match="has lost its lease: process 0 on elsewhere"):
            lose_turn(store, stage)
        assert signal.getsignal(signal.SIGTERM) == before


def lose_turn(store: SharedStore, stage: SharedStage) -> None:
    """Make a stage that another machine takes over in the meantime."""
    key = lease_key(stage.label, stage.fingerprint)
    with store.making(stage, attached=False):
        for _ in range(600):
            record = LeaseRecord.read(store.backend, key)
            theirs = dataclasses.replace(record, token=9, holder=Holder("other", "elsewhere", 0, "now"))
            with contextlib.suppress(Conflict):
                store.backend.write(key, theirs.encode(), replaces=record.version)
            time.sleep(0.1)


@pytest.mark.slow
def test_whoever_has_lost_its_turn_stops_and_changes_nothing(start: Start, tmp_path: Path) -> None:
    """A machine stood still for longer than its lease: another one trains on, and the first ends with one line."""
    slow = machine(tmp_path / "slow", tmp_path / "store")
    slow.run("Precompile", "--phase", "1")
    process = start(slow, "Pretrain", "--phase", "1", "--Phase1-max-steps", "100000", FAILPOINT="companion",
                         FAILPOINT_ACTION="stop", FAILPOINT_TOKEN=str(_token(tmp_path)))  # fmt: skip
    wait_until(lambda: "LOG" in _log(slow))
    fast = machine(tmp_path / "fast", tmp_path / "store")
    other = start(fast, "Pretrain", "--phase", "1", "--Phase1-max-steps", "100000")
    wait_until(lambda: "LOG" in _log(fast))
    for pid in _stopped(slow):
        os.kill(pid, signal.SIGCONT)
    assert process.wait() == 10, _log(slow)
    assert "this machine has lost its lease: process" in _log(slow)
    token = _lease(tmp_path / "store")["token"]
    other.send_signal(signal.SIGTERM)
    assert other.wait() == 75
    assert _lease(tmp_path / "store")["token"] == token


def test_a_store_that_cannot_be_used_is_one_line_before_anything_starts(tmp_path: Path) -> None:
    chain = machine(tmp_path / "first", tmp_path / "store")
    (tmp_path / "store").write_text("a file")
    done = chain.run("ShardDataset", "--phase", "1", status=35)
    assert "is a file; give a folder, or s3://bucket/prefix" in done.stderr
    assert not chain.work.exists()
    (tmp_path / "store").unlink()
    chain.run("ShardDataset", "--phase", "1", "--Store-push", "models", "--Store-pull", "none")
    assert not (tmp_path / "store").exists()
    # What was not pushed when it was made is pushed by a later run.
    done = chain.run("ShardDataset", "--phase", "1")
    assert stored(tmp_path / "store") == {"shard_dataset-phase1"}


WSD = ("--Phase1-schedule", "wsd", "--Phase1-decay-share", "0.5", "--Phase1-num-ckpts-to-keep", "1")


@pytest.mark.slow
def test_a_fetched_training_is_gone_on_with_like_one_that_was_made_here(tmp_path: Path) -> None:
    """By phase 2, and by a longer training that starts from the checkpoint before the decay."""
    made, other = (machine(tmp_path / name, tmp_path / "store") for name in ("made", "other"))
    made.run("Pretrain", "--phase", "1", *WSD)
    assert "pretrain-phase1: fetched from" in other.run("ConvertCheckpoint", *WSD).stderr
    made.run("ConvertCheckpoint", *WSD, "--Store-push", "none", "--Store-pull", "none")
    checkpoints = (chain.latest("convert_checkpoint") / "checkpoint" for chain in (other, made))
    assert_same_bytes(*checkpoints)
    assert "continues from step 4 of" in other.run("Pretrain", "--phase", "1", *WSD, "--Phase1-max-steps", "12").stderr


def _log(chain: Chain) -> str:
    return (chain.directory / "luigi.log").read_text(errors="replace")


def _lease(store: Path) -> dict:  # type: ignore[type-arg]
    """The lease of phase 1's training."""
    found = list((store / "leases").glob("pretrain-phase1-*.json"))
    return (read_json(found[0]) or {"content": {}})["content"] if found else {}


def _token(directory: Path) -> Path:
    path = directory / "once"
    path.write_text("")
    return path


def _stopped(chain: Chain) -> list[int]:
    import psutil

    return [
        process.pid
        for process in psutil.process_iter(["status", "cmdline"])
        if process.info["status"] == psutil.STATUS_STOPPED
        and str(chain.work) in " ".join(process.info["cmdline"] or ())
    ]
