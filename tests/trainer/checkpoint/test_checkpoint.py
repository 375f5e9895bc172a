"""Checkpoints: readable by the safetensors library, and used only if they are whole."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch

from common.errors import CheckpointError, DiskError
from tests.helpers.chain import wait_until
from tests.helpers.support import FORKS
from trainer.checkpoint import checkpointer as checkpointer_module
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.directory import why_invalid
from trainer.checkpoint.format import read_tensors, write_tensors
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.snapshot import Snapshot
from trainer.checkpoint.stable import stable_step
from trainer.checkpoint.tensor_file import TensorFile
from trainer.config import TrainConfig
from trainer.parallel.mesh import Mesh
from trainer.state import TrainState


def snapshot(global_step: int, scale: float = 1.0) -> Snapshot:
    state = TrainState(
        phase=1, step=global_step, global_step=global_step, samples_consumed=0, epoch=0, seed=0, global_batch_size=1,
        data="d", order_version=1, optimizer="AdamW", precision="fp32", model={"hidden_size": 4},
        data_parallel_size=1, tensor_parallel_size=1, micro_batch_size=1, torch_version="2",
    )  # fmt: skip
    tensors = {"a.weight": scale * torch.arange(12.0).reshape(3, 4), "b.bias": torch.ones(5, dtype=torch.bfloat16)}
    return Snapshot(state, tensors, {f"exp_avg.{name}": t.float() for name, t in tensors.items()})


def save(directory: Path, *steps: int, keep: int = -1, size: int = 1) -> CheckpointManager:
    """Save as `size` ranks that share a model; returns the first rank's manager."""
    managers = [CheckpointManager(directory, keep=keep, log=lambda line: None, rank=r, size=size) for r in range(size)]
    managers[0].prepare()
    for step in steps:
        for manager in managers:
            manager.save(snapshot(step))
        for manager in managers:
            manager.finish()
    return managers[0]


def test_files_are_what_the_safetensors_library_reads(tmp_path: Path) -> None:
    tensors = {
        "x": torch.randn(3, 5),
        "y": torch.randn(7, dtype=torch.float64),
        "z": torch.randn(2, 2).bfloat16(),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 4),
        "strided": torch.randn(4, 6).t(),
    }
    entry = write_tensors(tmp_path / "t.safetensors", tensors, {"format": "pt"})
    loaded = safetensors.torch.load_file(tmp_path / "t.safetensors")
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor), name
    digest = subprocess.run(["sha256sum", tmp_path / "t.safetensors"], capture_output=True, text=True, check=True)
    assert entry["sha256"] == digest.stdout.split()[0]
    assert entry["bytes"] == (tmp_path / "t.safetensors").stat().st_size


@pytest.mark.parametrize("size", [1, 2])
def test_any_damage_is_found_and_the_checkpoint_before_is_used(tmp_path: Path, size: int) -> None:
    """A byte changed, or the file truncated, at 100 places in each file of each rank."""
    said: list[str] = []
    save(tmp_path, 1, 2, size=size)
    assert len(list((tmp_path / "ckpt_2").glob("*.safetensors"))) == 2 * size
    manager = CheckpointManager(tmp_path, keep=-1, log=said.append)
    rng = random.Random(0)
    newest = tmp_path / "ckpt_2"
    assert [p.name for p in manager.valid()] == ["ckpt_2", "ckpt_1"]
    for path in sorted(newest.iterdir()):
        whole = path.read_bytes()
        for _ in range(100):
            at = rng.randrange(len(whole))
            flipped = bytes([whole[at] ^ (1 << rng.randrange(8))])
            for damaged in (whole[:at] + flipped + whole[at + 1 :], whole[:at]):
                path.write_bytes(damaged)
                said.clear()
                assert next(manager.valid()).name == "ckpt_1", (path.name, at)
                assert len(said) == 1
                assert "ckpt_2" in said[0]
                assert path.name in said[0]
        path.write_bytes(whole)
    assert next(manager.valid()).name == "ckpt_2"


def test_a_missing_file_or_manifest_is_named(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for path in (tmp_path / "ckpt_1").iterdir():
        aside = tmp_path / "aside"
        path.rename(aside)
        assert path.name in (why_invalid(tmp_path / "ckpt_1") or "")
        aside.rename(path)
    assert why_invalid(tmp_path / "ckpt_1") is None


def test_reading_something_else_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"\x80\x04pickle")
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        dict(read_tensors(tmp_path / "x.safetensors"))


def test_leftovers_of_dead_runs_are_swept(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "ckpt_2.tmp").mkdir()
    (tmp_path / "ckpt_2.tmp" / "model-00-of-01.safetensors").write_bytes(b"half")
    save(tmp_path, 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ckpt_1", "ckpt_3"]


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    """A file size limit makes write() itself fail, in the background thread; the next call raises the error."""
    manager = save(tmp_path, 1, keep=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        manager.save(snapshot(2))
        with pytest.raises(DiskError, match=r"cannot write .*ckpt_2"):
            manager.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt_1"]
    assert why_invalid(tmp_path / "ckpt_1") is None
    manager.save(snapshot(2))
    manager.finish()
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt_2"]


def test_a_rank_that_cannot_write_is_not_waited_for(tmp_path: Path) -> None:
    """The first rank, which waits up to ten minutes for the other's share, gives up and reports the other's reason."""
    first, second = (CheckpointManager(tmp_path, keep=-1, rank=rank, size=2) for rank in range(2))
    first.prepare()
    (tmp_path / "ckpt_1.tmp" / "model-01-of-02.safetensors.tmp").mkdir(parents=True)  # blocks its file
    for manager in (second, first):
        manager.save(snapshot(1))
    with pytest.raises(DiskError, match=r"^cannot write .*model-01-of-02"):
        second.finish()
    with pytest.raises(DiskError, match=r"rank 1 has not written its share: cannot write .*model-01-of-02"):
        first.finish()
    assert not list(first.valid())
    first.prepare()
    assert not list(tmp_path.iterdir())


def test_a_rank_that_has_begun_is_waited_for_and_one_that_has_not_is_not_for_long(tmp_path: Path) -> None:
    """A large share may take any time; a rank with another directory never begins."""
    first = CheckpointManager(tmp_path, keep=-1, rank=0, size=2, timeout_s=0.2)
    first.prepare()
    first.save(snapshot(1))
    with pytest.raises(DiskError, match=r"rank 1 has not begun its share within 0\.2 s; is the directory the same"):
        first.finish()
    first, second = (CheckpointManager(tmp_path, keep=-1, rank=rank, size=2, timeout_s=2) for rank in range(2))
    first.prepare()
    first.save(snapshot(2))
    note = tmp_path / "ckpt_2.tmp" / "rank-01.json"
    wait_until(note.parent.is_dir, every_s=0.01)
    note.write_text("{}")
    time.sleep(3)
    second.save(snapshot(2))
    for manager in (second, first):
        manager.finish()
    assert why_invalid(tmp_path / "ckpt_2") is None


def test_checkpoints_by_time_are_as_far_apart_as_was_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes 25 s here."""
    now = 1000.0
    monkeypatch.setattr(checkpointer_module, "time", SimpleNamespace(monotonic=lambda: now))
    config = TrainConfig(output_dir=tmp_path, ckpt_interval_steps=0, ckpt_interval_minutes=1)
    checkpointer = Checkpointer(config, None, Mesh(), lambda line: None)  # type: ignore
    saved = []
    for step in range(1, 13):
        now += 25
        state: Any = SimpleNamespace(step=step)
        if checkpointer.is_due(state):
            checkpointer.save(state)
            saved.append(step)
    assert saved == [3, 6, 9, 12]


def test_a_worker_whose_write_fails_ends_although_others_wait_for_it(tmp_path: Path) -> None:
    """It cannot leave a note either, so only its end ends the others: at the last checkpoint, no step follows."""

    def others_are_busy(is_busy: Callable[[], bool]) -> None:
        for _ in range(3000):
            is_busy()
            time.sleep(0.01)
        pytest.fail("it waits with the others")

    mesh = SimpleNamespace(is_root=False, tensor_parallel_rank=1, tensor_parallel_size=2, wait_while=others_are_busy)
    checkpointer = Checkpointer(TrainConfig(output_dir=tmp_path), None, mesh, lambda line: None)  # type: ignore
    checkpointer._manager.save(snapshot(1))  # into a directory that does not exist
    with pytest.raises(DiskError, match="cannot write .*ckpt_1.tmp"):
        checkpointer.close()


def _save_2(directory: Path, failpoint: str) -> None:
    os.environ["FAILPOINT"] = failpoint
    save(directory, 2, keep=1)


@pytest.mark.parametrize(
    "failpoint",
    [
        f"{kind}:{name}"
        for name in ("model-00-of-01.safetensors", "optimizer-00-of-01.safetensors", "state.json", "manifest.json")
        for kind in ("write-before", "write-after", "rename-before", "rename-after")
    ]
    + ["rename-before:ckpt_2", "rename-after:ckpt_2"],
)
def test_a_kill_while_saving_leaves_a_whole_checkpoint(tmp_path: Path, failpoint: str) -> None:
    save(tmp_path, 1)
    killed = FORKS.Process(target=_save_2, args=(tmp_path, failpoint))
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    newest = next(CheckpointManager(tmp_path, keep=1).valid()).name
    assert newest == ("ckpt_2" if failpoint == "rename-after:ckpt_2" else "ckpt_1")
    assert next(save(tmp_path, 2, keep=1).valid()).name == "ckpt_2"
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt_2"]


@pytest.mark.parametrize(
    ("removed", "added", "said"),
    [("optimizer", "", "state.json lacks optimizer: another"), ("", "momenta", "holds an unknown momenta: another")],
)
def test_the_state_of_another_version_is_one_line(tmp_path: Path, removed: str, added: str, said: str) -> None:
    """And no training is continued from such a checkpoint by itself."""
    record = {name: value for name, value in snapshot(7).state.to_json().items() if name != removed}
    (tmp_path / "state.json").write_text(json.dumps({**record, **({added: 1} if added else {})}))
    with pytest.raises(CheckpointError, match=said):
        TrainState.read(tmp_path)
    assert stable_step(tmp_path) is None


def test_an_old_checkpoint_that_cannot_be_removed_stops_nothing(tmp_path: Path) -> None:
    """On NFS, what a reader has open stays; here, what is mounted. The next start removes it."""
    save(tmp_path, 1, keep=1)
    held = tmp_path / "ckpt_1" / "held"
    held.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "test-held", held], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"nothing can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        manager = CheckpointManager(tmp_path, keep=1, log=lambda line: None)
        manager.save(snapshot(2))
        manager.finish()
        manager.prepare()
        assert [step for step, _ in manager.paths()] == [2]
    finally:
        subprocess.run(["umount", tmp_path / "ckpt_1.tmp" / "held"], check=True)
    manager.prepare()
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt_2"]


def test_a_file_system_may_give_less_than_it_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 7 bytes at a time; a file that ends early is still refused."""
    tensors = {"x": torch.randn(3, 5)}
    entry = write_tensors(tmp_path / "file.safetensors", tensors, {})
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: read(file, [buffers[0][:7]], at))
    found = torch.empty(3, 5)
    with contextlib.closing(TensorFile(tmp_path / "file.safetensors", entry["sha256"])) as file:
        file.read("x", 0, found)
        file.finish()
    assert torch.equal(found, tensors["x"])
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: 0)
    with pytest.raises(CheckpointError, match="became shorter"):
        dict(read_tensors(tmp_path / "file.safetensors"))
