"""A step that is not finite costs its batch and nothing else: all continues as if that batch had never existed."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.support import assert_one_line_error, assert_same_bytes, losses, metrics, train
from trainer.data.batch_ramp import BatchSizes
from trainer.data.order import SampleOrder

GIVEN: dict[str, Any] = {
    "batch_size": 4, "warmup_steps": 1, "max_pred_len": 5, "device": "cpu", "max_steps": 10, "precision": "fp32",
    "ckpt_interval_steps": 3, "num_ckpts_to_keep": -1, "record_samples": True,
}  # fmt: skip
#: Batch 4, in step 5, gives a loss that is not a number, every time it is used.
BAD = {"FAILPOINT": "batch:4.0", "FAILPOINT_ACTION": "damage"}


def run(
    data: Path, model: Path, out: Path, workers: int = 1, *, env: dict[str, str] | None = None, **values: Any
) -> str:
    given = {**GIVEN, "data_dir": data, "model_config": model, "output_dir": out, **values}
    done = train(workers, env=env, grad_accum_usteps=4 // workers, **given)
    assert done.returncode == 0, done.stdout
    return done.stdout


def samples(out: Path) -> list[np.ndarray]:
    """The samples of each step; for steps done twice, those of the last time."""
    lines = map(json.loads, (out / "samples-0.jsonl").read_text().splitlines())
    by_step = {record["step"]: np.array(record["samples"]) for record in lines}
    return [by_step[step] for step in sorted(by_step)]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_batch_is_left_out_and_said(data: Path, model: Path, tmp_path: Path, workers: int) -> None:
    out = tmp_path / "out"
    said = run(data, model, out, workers, env=BAD)
    assert "step 5: masked_lm_loss nan" in said
    assert "going back to the last checkpoint and continuing without batch 4" in said
    assert said.count("resuming from checkpoint") == 1
    assert "ckpt_3 at step 3" in said
    state = json.loads((out / "checkpoints" / "ckpt_10" / "state.json").read_text())
    assert (state["skipped"], state["step"]) == ([4], 10)
    assert json.loads((out / "results.json").read_text())["skipped_batches"] == [4]
    assert [record["step"] for record in metrics(out)] == list(range(1, 11))
    assert np.isfinite(losses(out)).all()
    if workers == 1:
        order = SampleOrder(np.array([37, 40, 23, 31]), seed=12349, sizes=[BatchSizes(16)])
        for step, found in enumerate(samples(out)):
            wanted = order.step(step + (step >= 4))
            np.testing.assert_array_equal(found, np.stack([wanted.shard, wanted.row], axis=1))


@pytest.mark.slow
def test_going_back_to_another_checkpoint_or_resuming_ends_with_the_same_bytes(
    data: Path, model: Path, tmp_path: Path
) -> None:
    run(data, model, tmp_path / "straight", env=BAD)
    wanted = tmp_path / "straight" / "checkpoints" / "ckpt_10"
    run(data, model, tmp_path / "each", env=BAD, ckpt_interval_steps=1)
    run(data, model, tmp_path / "none", env=BAD, ckpt_interval_steps=0)
    # Stopped before and after the bad batch; the second time the checkpoint knows of it.
    run(data, model, tmp_path / "cut", env=BAD, steps_this_run=4)
    run(data, model, tmp_path / "cut", env=BAD, steps_this_run=7, resume_ckpt=True)
    said = run(data, model, tmp_path / "cut", resume_ckpt=True)
    assert "without batch" not in said
    for name in ("each", "none", "cut"):
        assert_same_bytes(tmp_path / name / "checkpoints" / "ckpt_10", wanted, why=name)
    assert losses(tmp_path / "cut") == losses(tmp_path / "straight")


def test_a_resumed_run_that_meets_the_bad_batch_goes_back(data: Path, model: Path, tmp_path: Path) -> None:
    run(data, model, tmp_path / "straight", env=BAD)
    out = tmp_path / "out"
    run(data, model, out, steps_this_run=3)
    run(data, model, out, env=BAD, resume_ckpt=True)
    assert_same_bytes(out / "checkpoints" / "ckpt_10", tmp_path / "straight" / "checkpoints" / "ckpt_10")


@pytest.mark.parametrize("workers", [1, 2])
def test_given_up_with_advice_that_works(data: Path, model: Path, tmp_path: Path, workers: int) -> None:
    """A learning rate no batch survives: after the limit, one line and the last good checkpoint; its advice works."""
    given = {
        **GIVEN, "data_dir": data, "model_config": model, "output_dir": tmp_path, "ckpt_interval_steps": 1,
        "warmup_steps": 2, "grad_accum_usteps": 4 // workers,
    }  # fmt: skip
    done = train(workers, **given, lr=1e30, non_finite_limit=2)
    advice = ("2 batches have been left out already", "non_finite_limit is 2", "--resume_step", "--allow_changes lr")
    assert_one_line_error(done, "gradient norm", *advice)
    assert done.stdout.count("going back to the last checkpoint") == 2
    # Step 1 has the rate 0. The weights after step 2 are huge, but finite.
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["ckpt_1", "ckpt_2"]
    done = train(workers, **given, lr=1e-3, resume_ckpt=True, resume_step=1, allow_changes="lr")
    assert done.returncode == 0, done.stdout
    assert np.isfinite(losses(tmp_path)).all()


def test_stopping_instead_is_a_choice(data: Path, model: Path, tmp_path: Path) -> None:
    given = {**GIVEN, "data_dir": data, "model_config": model, "output_dir": tmp_path, "grad_accum_usteps": 4}
    done = train(env=BAD, non_finite="stop", **given)
    assert_one_line_error(done, "step 5", "nan", "--non_finite skip")
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["ckpt_3"]


def test_a_killed_run_that_is_resumed_goes_back_at_the_bad_batch(data: Path, model: Path, tmp_path: Path) -> None:
    given = {**GIVEN, "data_dir": data, "model_config": model, "output_dir": tmp_path, "grad_accum_usteps": 4}
    assert train(env={"FAILPOINT": "step:4.0"}, **given).returncode == -signal.SIGKILL
    done = train(env=BAD, resume_ckpt=True, **given)
    assert done.returncode == 0, done.stdout
    assert "continuing without batch 4" in done.stdout


def test_skipped_batches_leave_no_gap_in_the_order() -> None:
    rows = np.array([20, 21])
    plain = SampleOrder(rows, seed=3, sizes=[BatchSizes(5)])
    order = SampleOrder(rows, seed=3, sizes=[BatchSizes(5)], skipped=[7, 2, 3, 8])
    left = [batch for batch in range(30) if batch not in (2, 3, 7, 8)]
    for first, last in ((0, 20), (1, 2), (2, 6), (4, 9)):
        found = order.steps(first, last)
        wanted = [plain.step(batch) for batch in left[first:last]]
        np.testing.assert_array_equal(found.row, np.concatenate([one.row for one in wanted]))
        np.testing.assert_array_equal(found.shard, np.concatenate([one.shard for one in wanted]))
    assert [order.epoch_of(step) for step in range(20)] == [batch // 8 for batch in left[:20]]
