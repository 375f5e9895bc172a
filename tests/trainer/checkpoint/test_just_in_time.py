"""A worker is killed: a surviving one saves the last completed step, and only the step in progress is repeated."""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import DiskError, NonFiniteStep
from tests.helpers.small_language import train_here, trainer_here
from tests.helpers.support import FORKS, all_end, assert_same_bytes, metrics, train
from trainer.checkpoint import manager
from trainer.checkpoint.directory import why_invalid
from trainer.metrics.results import append_missing, recorded_steps
from trainer.parallel.mesh import Mesh

STEPS = 8
GIVEN: dict[str, Any] = {
    "batch_size": 2, "warmup_steps": 1, "max_pred_len": 5, "device": "cpu", "max_steps": STEPS,
    "num_ckpts_to_keep": -1, "precision": "fp32", "lr": 1e-3, "ckpt_interval_steps": 0,
}  # fmt: skip


def names(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir() if path.suffix != ".tmp")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "size", "victim", "optimizer"),
    [
        (2, 1, 0, "AdamW"), (2, 1, 1, "LAMB"), (4, 1, 0, "AdamW"), (4, 1, 2, "Muon"),
        (4, 2, 0, "AdamW"), (4, 2, 1, "LAMB"), (4, 2, 3, "Muon"),
    ],
)  # fmt: skip
def test_the_last_whole_step_is_saved(
    data: Path, model: Path, tmp_path: Path, workers: int, size: int, victim: int, optimizer: str
) -> None:
    given = {
        **GIVEN, "data_dir": data, "model_config": model, "optimizer": optimizer, "tensor_parallel_size": size,
        "grad_accum_usteps": 8 * size // workers,
    }  # fmt: skip
    straight = train(workers, **{**given, "output_dir": tmp_path / "straight", "ckpt_interval_steps": 1})
    assert straight.returncode == 0, straight.stdout
    out = tmp_path / "out"
    given["output_dir"] = out
    done = train(workers, env={"FAILPOINT": f"micro-step:5.1.{victim}"}, **given)
    assert done.returncode, done.stdout
    assert names(out) == ["ckpt_5"], done.stdout
    assert done.stdout.count("has saved step 5: another worker is lost") == 1
    assert_same_bytes(out / "checkpoints" / "ckpt_5", tmp_path / "straight" / "checkpoints" / "ckpt_5")
    assert [record["step"] for record in metrics(out)] == [1, 2, 3, 4, 5]
    done = train(workers, resume_ckpt=True, **given)
    assert done.returncode == 0, done.stdout
    assert f"resuming from checkpoint {out / 'checkpoints' / 'ckpt_5'}" in done.stdout
    assert names(out) == ["ckpt_5", f"ckpt_{STEPS}"]
    assert_same_bytes(out / "checkpoints" / f"ckpt_{STEPS}", tmp_path / "straight" / "checkpoints" / f"ckpt_{STEPS}")
    same = {"step", "epoch", "samples", "loss", "grad_norm", "learning_rate"}
    found, wanted = metrics(out), metrics(tmp_path / "straight")
    assert [[record[key] for key in same] for record in found] == [[record[key] for key in same] for record in wanted]
    assert {tuple(record) for record in found} == {tuple(record) for record in wanted}


@pytest.mark.parametrize(("workers", "size"), [(1, 1), (2, 2)])
def test_without_a_replica_nothing_is_saved(data: Path, model: Path, tmp_path: Path, workers: int, size: int) -> None:
    given = {**GIVEN, "data_dir": data, "model_config": model, "output_dir": tmp_path, "grad_accum_usteps": 4}
    done = train(workers, env={"FAILPOINT": "micro-step:5.1.0"}, tensor_parallel_size=size, **given)
    assert done.returncode, done.stdout
    assert names(tmp_path) == []


def test_a_step_that_is_not_finite_is_not_saved(data: Path, model: Path, tmp_path: Path) -> None:
    """The third loss is not a number; worker 1 dies before the workers have told each other about it."""
    given = {**GIVEN, "data_dir": data, "model_config": model, "output_dir": tmp_path, "grad_accum_usteps": 4}
    given |= {"lr": 1e38, "max_grad_norm": 0}
    done = train(2, env={"FAILPOINT": "step:3.1"}, **given)
    assert done.returncode, done.stdout
    assert "lost the connection" in done.stdout
    assert names(tmp_path) == []


def test_weights_or_moments_that_are_not_finite_are_not_saved(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They broke in a step whose loss was still finite; the other worker is lost before the workers compare them."""
    trainer, _ = trainer_here(data, tmp_path, steps=6, warmup_steps=1)
    monkeypatch.setattr(trainer.checkpointer, "_mesh", Mesh(world_size=2, local_world_size=2))
    usual, calls = trainer.optimizer.prepare, []
    broken, moment = next(iter(trainer.tensors[1].items()))

    def fails() -> None:
        usual()
        calls.append(1)
        if len(calls) == 4:
            moment.fill_(math.nan)
            raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1")

    monkeypatch.setattr(trainer.optimizer, "prepare", fails)
    with pytest.raises(RuntimeError, match="closed by peer"):
        trainer.train()
    trainer.metrics.abandon()
    assert names(tmp_path) == []
    assert f"could not save step 3: {broken} is no longer finite" in capsys.readouterr().err


def test_any_error_leaves_the_checkpoint_under_way_whole(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _ = trainer_here(data, tmp_path, steps=6, warmup_steps=1, ckpt_interval_steps=3)
    write, usual, calls = manager.write_shard, trainer.optimizer.prepare, []

    def slowly(*given: Any) -> Any:
        time.sleep(1.5)
        return write(*given)

    def fails() -> None:
        usual()
        calls.append(1)
        if len(calls) == 4:
            raise MemoryError("out of memory")

    monkeypatch.setattr(manager, "write_shard", slowly)
    monkeypatch.setattr(trainer.optimizer, "prepare", fails)
    with pytest.raises(MemoryError):
        trainer.train()
    trainer.metrics.abandon()
    assert names(tmp_path) == ["ckpt_3"]
    assert why_invalid(tmp_path / "checkpoints" / "ckpt_3") is None


def _agree_on_an_error(rank: int, port: int, data: Path, out: Path, fails: bool) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    mesh = Mesh(rank=rank, local_rank=rank, world_size=2, local_world_size=2).connect("gloo", 60)
    trainer, _ = trainer_here(data, out / str(rank), steps=6, warmup_steps=1)
    trainer.mesh = mesh
    written = out / "written"

    def write() -> None:
        time.sleep(1.5)
        if fails:
            raise DiskError("disk full")
        written.touch()

    def train() -> None:
        if rank == 0:
            trainer.checkpointer._manager.begin(write)
        raise NonFiniteStep("step 3", step=3)

    trainer._train = train  # type: ignore[method-assign]
    with pytest.raises(NonFiniteStep):
        trainer.train()
    assert fails or written.exists(), "in each worker: torchrun kills the root 30 s after the first of them has ended"
    assert mesh.sum_on_host([rank + 1]) == [3], "they are at the same point"
    mesh.disconnect()


@pytest.mark.parametrize("fails", [False, True])
def test_workers_that_agree_on_an_error_wait_together_for_the_checkpoint_under_way(
    data: Path, tmp_path: Path, fails: bool
) -> None:
    all_end(_agree_on_an_error, 2, data, tmp_path, fails)


@pytest.mark.parametrize("where", ["prepare", "step"])
def test_a_half_updated_state_is_not_saved(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A collective fails before an update has changed anything, or in the middle of one."""
    trainer, _ = trainer_here(data, tmp_path, steps=6, warmup_steps=1, optimizer="Muon")
    monkeypatch.setattr(trainer.checkpointer, "_mesh", Mesh(world_size=2, local_world_size=2))
    usual, calls = getattr(trainer.optimizer, where), []

    def fails(*arguments: float) -> None:
        usual(*arguments)
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1")

    monkeypatch.setattr(trainer.optimizer, where, fails)
    before = {name: tensor.clone() for name, tensor in trainer.tensors[1].items()}
    with pytest.raises(RuntimeError, match="closed by peer"):
        trainer.train()
    trainer.metrics.abandon()
    changed = [name for name, tensor in trainer.tensors[1].items() if not torch.equal(tensor, before[name])]
    assert changed
    if where == "step":
        assert names(tmp_path) == []
        return
    assert names(tmp_path) == ["ckpt_3"]
    straight = tmp_path / "straight"
    train_here(data, straight, steps=6, warmup_steps=1, optimizer="Muon", ckpt_interval_steps=3)
    assert_same_bytes(tmp_path / "checkpoints" / "ckpt_3", straight / "checkpoints" / "ckpt_3")


def line(step: int) -> str:
    record = {"step": step, "epoch": 0, "loss": 1.0, "throughput": 1.0, "step_time_s": 0.1}
    return json.dumps(record) + "\n"


def steps(path: Path) -> list[int]:
    return [record["step"] for record, _ in recorded_steps(path)]


def test_missing_records_are_appended_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1) + line(2) + line(3)[:20])  # the root was killed while it wrote
    append_missing(path, {step: line(step) for step in range(2, 6)})
    assert path.read_text() == "".join(line(step) for step in range(1, 6))
    append_missing(path, {step: line(step) for step in range(4, 6)})
    assert steps(path) == [1, 2, 3, 4, 5]
    with pytest.raises(DiskError, match="ends with step 5, and this worker only knows steps from 7 on"):
        append_missing(path, {7: line(7)})
    assert steps(path) == [1, 2, 3, 4, 5]


def _append(has_begun: Event, path: Path) -> None:
    has_begun.set()
    append_missing(path, {step: line(step) for step in range(2, 13)})


def test_several_workers_append_one_after_the_other(tmp_path: Path) -> None:
    """This process appends up to step 9 while another one waits."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1))
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        has_begun = FORKS.Event()
        other = FORKS.Process(target=_append, args=(has_begun, path))
        other.start()
        assert has_begun.wait(60)
        other.join(1.0)
        assert other.is_alive()
        file.write("".join(line(step) for step in range(2, 10)))
    other.join()
    assert steps(path) == list(range(1, 13))
