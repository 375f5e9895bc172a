"""`--new_data`: a phase that starts from another training's weights and moments, on other data."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.duration import Duration
from common.errors import CheckpointError, Interrupted
from tests.helpers.checkpoints import save, snapshot
from tests.helpers.support import (
    assert_one_line_error,
    assert_same_bytes,
    command,
    metrics,
    train,
    write_dataset,
    write_model_config,
)
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.resume_point import agree_on_start, checkpoint_directory
from trainer.config import TrainConfig
from trainer.devices.cpu import CpuDevice
from trainer.metrics import rehearsal
from trainer.parallel.mesh import Mesh
from trainer.run import Run
from trainer.state import TrainState

#: A batch is the whole data set: every step of any epoch sees the same samples.
ROWS = 16
GIVEN: dict[str, Any] = {
    "batch_size": 4, "grad_accum_usteps": 4, "max_pred_len": 5, "device": "cpu", "lr": 3e-3, "schedule": "constant",
    "warmup_steps": 0, "ckpt_interval_steps": 0, "precision": "fp32", "max_steps": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def model_without_dropout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    without = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    return write_model_config(tmp_path_factory.mktemp("model"), **without)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other data: a single batch."""
    return write_dataset(tmp_path_factory.mktemp("others"), [ROWS])


def run(data: Path, model: Path, out: Path, *, status: int = 0, **values: Any) -> Any:
    done = train(data_dir=data, model_config=model, output_dir=out, **{**GIVEN, **values})
    assert done.returncode == status, done.stdout + done.stderr
    return done


@pytest.mark.parametrize("optimizer", ["AdamW", "LAMB", "Muon"])
def test_weights_and_moments_go_on_and_the_steps_begin_anew(
    data: Path, model_without_dropout: Path, others: Path, tmp_path: Path, optimizer: str
) -> None:
    """The losses equal those of the same training resumed with its step count on the same data; and
    an interrupted run ends with the same bytes. Moments of 4 steps taken for those of 0 would be corrected by 1 / 0.1
    instead of 1 / 0.41: no tolerance would hide that."""
    model = model_without_dropout
    run(data, model, tmp_path / "first", optimizer=optimizer)
    given = tmp_path / "first" / "checkpoints" / "ckpt_4"
    more = {"optimizer": optimizer, "max_steps": 8, "resume_ckpt_path": given, "allow_changes": "data"}
    assert "resuming from checkpoint" in run(others, model, tmp_path / "counted", **more).stdout
    new = {"optimizer": optimizer, "resume_ckpt_path": given, "new_data": True}
    out = run(others, model, tmp_path / "new", **new).stdout
    assert f"starting from checkpoint {given} with its weights and optimizer, after 4 steps on other data" in out
    found, wanted = (metrics(tmp_path / name) for name in ("new", "counted"))
    assert [record["step"] for record in found] == [1, 2, 3, 4]
    # The samples of a batch come in another order, so sums are rounded differently.
    assert [one["loss"] for one in found] == pytest.approx([one["loss"] for one in wanted[-4:]], rel=1e-5)
    end = tmp_path / "new" / "checkpoints" / "ckpt_4"
    assert TrainState.read(end).optimizer_steps == 8
    assert "steps_before" not in TrainState.read(given).to_json()
    # Whether it is interrupted before or after its first checkpoint, the same command continues it.
    run(others, model, tmp_path / "twice", steps_this_run=2, **new)
    out = run(others, model, tmp_path / "twice", **new).stdout
    assert "resuming from checkpoint" in out
    assert_same_bytes(tmp_path / "twice" / "checkpoints" / "ckpt_4", end)


def test_steps_are_measured_without_the_checkpoint(data: Path, model: Path, others: Path, tmp_path: Path) -> None:
    """With a time budget, whose rehearsal trains from initial weights."""
    run(data, model, tmp_path / "first", max_steps=2)
    given = {"resume_ckpt_path": tmp_path / "first" / "checkpoints" / "ckpt_2", "new_data": True}
    out = run(others, model, tmp_path / "new", budget="100s", max_steps=False, steps_this_run=1, **given).stdout
    assert "with its weights and optimizer, after 2 steps on other data" in out


def test_another_tools_checkpoint_goes_on_in_any_precision(
    data: Path, model: Path, others: Path, tmp_path: Path
) -> None:
    """It does not say in which it was trained; its moments are fp32."""
    run(data, model, tmp_path / "first", max_steps=2)
    native = tmp_path / "first" / "checkpoints" / "ckpt_2"
    assert command("-m", "stages.convert", str(native), str(tmp_path / "script"), "--to", "pt").returncode == 0
    script = tmp_path / "script" / "ckpt_2.pt"
    done = command("-m", "stages.convert", str(script), str(tmp_path / "back"), "--config", str(model))
    assert done.returncode == 0, done.stderr
    given = {"resume_ckpt_path": tmp_path / "back" / "checkpoint", "new_data": True, "max_steps": 1}
    for precision in ("auto", "autocast", "fp32"):
        run(others, model, tmp_path / precision, precision=precision, **given)
        state = TrainState.read(tmp_path / precision / "checkpoints" / "ckpt_1")
        wanted = CpuDevice().automatic_precision()[0] if precision == "auto" else precision
        assert (state.precision, state.optimizer_steps) == (wanted, 3)


def test_a_state_of_another_directory_becomes_ones_own_although_no_step_follows(
    data: Path, model: Path, tmp_path: Path
) -> None:
    run(data, model, tmp_path / "first")
    end = tmp_path / "first" / "checkpoints" / "ckpt_4"
    run(data, model, tmp_path / "second", resume_ckpt_path=end, max_steps=8, steps_this_run=4)
    assert_same_bytes(tmp_path / "second" / "checkpoints" / "ckpt_4", end)
    done = run(data, model, tmp_path / "third", resume_ckpt_path=end, status=1)
    assert_one_line_error(done, "is of the last step, 4: nothing is left to train; give more --max_steps")


def test_a_budget_is_measured_in_the_precision_of_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    save(tmp_path / "first", snapshot(step=4))
    checkpoint = tmp_path / "first" / "ckpt_4"
    seen: list[str] = []

    def make_trainer(run: Run, requests: Any) -> Any:
        seen.append(run.config.wanted_precision)
        raise Interrupted("")

    nothing: Any = SimpleNamespace()
    workload: Any = SimpleNamespace(masking=None)
    for precision, new_data in (("auto", True), ("autocast", True), ("auto", False)):
        config = TrainConfig(
            budget=Duration.parse("20m"), output_dir=tmp_path, warmup_steps=0, resume_ckpt_path=checkpoint,
            new_data=new_data, precision=precision,
        )  # fmt: skip
        with pytest.raises(Interrupted):
            rehearsal._measure(Run(config, workload, nothing, Mesh(), print), nothing, make_trainer)
    assert seen == ["fp32", "autocast", "auto"]


def test_what_cannot_be_continued_is_refused_with_one_line(data: Path, model: Path, tmp_path: Path) -> None:
    run(data, model, tmp_path / "first", max_steps=2)
    given = tmp_path / "first" / "checkpoints" / "ckpt_2"
    minimal = shutil.copytree(tmp_path / "first", tmp_path / "minimal")
    run(data, model, minimal, max_steps=3, minimal_ckpt=True, resume_ckpt=True)

    def refused(**values: Any) -> Any:
        return run(data, model, tmp_path / "new", status=1, new_data=True, **values)

    assert_one_line_error(refused(), "--new_data needs a checkpoint")
    own = run(data, model, tmp_path / "first", status=1, new_data=True, resume_ckpt_path=given)
    assert_one_line_error(own, "--new_data needs a checkpoint of another --output_dir")
    other = refused(resume_ckpt_path=given, optimizer="LAMB")
    assert_one_line_error(other, "was trained with optimizer = AdamW, this run has LAMB")
    other = refused(resume_ckpt_path=given, precision="autocast")
    assert_one_line_error(other, "was trained with precision = fp32, this run has autocast")
    without = refused(resume_ckpt_path=minimal / "checkpoints" / "ckpt_3")
    assert_one_line_error(without, "has no optimizer-00-of-01.safetensors")
    assert not list((tmp_path / "new" / "checkpoints").iterdir())


def test_a_checkpoint_of_another_phase_is_refused(tmp_path: Path) -> None:
    """Only its weights would be taken. One of the same phase gives its optimizer's state, too."""
    (tmp_path / "first").mkdir()
    save(tmp_path / "first", snapshot(step=7))
    config = TrainConfig(
        phase1_end_step=7, output_dir=tmp_path / "out", resume=True, resume_ckpt_path=tmp_path / "first" / "ckpt_7",
        new_data=True,
    )  # fmt: skip
    manager = CheckpointManager(checkpoint_directory(config), keep=2)
    start = agree_on_start(config, manager, Mesh(), print)
    assert start is not None
    assert start.restarts
    second = dataclasses.replace(config, phase=2)
    with pytest.raises(CheckpointError, match="--new_data .*ckpt_7 is of phase 1 and this run is phase 2; leave"):
        agree_on_start(second, manager, Mesh(), print)
