"""Global batches that grow: which samples are read at which step, exact resumes, any number of workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.support import assert_one_line_error, assert_same_bytes, metrics, train
from trainer.data.batch_ramp import BatchRamp
from trainer.data.order import SampleOrder

GIVEN: dict[str, Any] = {
    "batch_size": 2, "warmup_steps": 2, "max_pred_len": 5, "device": "cpu", "lr": 3e-3, "ckpt_interval_steps": 0,
    "precision": "fp32", "batch_ramp_steps": 6, "batch_ramp_parts": 4, "max_steps": 14,
}  # fmt: skip
#: Sizes for a batch of 16 in 4 parts over 6 steps, counted by hand: one more part every second step, then all.
SIZES = [4, 4, 8, 8, 12, 12, *[16] * 8]


def positions(rows: int) -> list[tuple[int, range]]:
    """The epoch of each step, and its samples' positions in the epoch: a batch that does not fit ends the epoch."""
    found, epoch, at = [], 0, 0
    for size in SIZES:
        if at + size > rows:
            epoch, at = epoch + 1, 0
        found.append((epoch, range(at, at + size)))
        at += size
    return found


@pytest.mark.parametrize("rows", [[131], [37, 40, 23, 31], [16], [19]])
def test_the_samples_of_each_step_are_those_of_an_independent_count(rows: list[int]) -> None:
    """Compared with the order of single samples, which knows nothing of batches."""
    single = SampleOrder(np.array(rows), seed=3, global_batch_size=1)
    order = SampleOrder(np.array(rows), seed=3, global_batch_size=16, ramp=BatchRamp(6, 4))
    total = sum(rows)
    for step, (epoch, places) in enumerate(positions(total)):
        wanted = [single.step(epoch * total + place) for place in places]
        found = order.step(step)
        assert list(zip(found.shard, found.row, strict=True)) == [(s.shard[0], s.row[0]) for s in wanted]
        assert (order.epoch_of(step), order.batch_size(step)) == (epoch, SIZES[step])
    together = order.steps(0, len(SIZES))
    np.testing.assert_array_equal(together.row, np.concatenate([order.step(step).row for step in range(len(SIZES))]))


def run(data: Path, model: Path, out: Path, workers: int = 1, **values: Any) -> Path:
    given = {**GIVEN, "grad_accum_usteps": 8 // workers, **values}
    done = train(workers, data_dir=data, model_config=model, output_dir=out, **given)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.mark.parametrize("stop", [1, 3, 6, 9])
def test_a_resume_in_the_middle_of_the_ramp_is_exact(data: Path, model: Path, tmp_path: Path, stop: int) -> None:
    straight = run(data, model, tmp_path / "straight")
    cut = run(data, model, tmp_path / "cut", steps_this_run=stop)
    run(data, model, cut, resume_ckpt=True)
    assert_same_bytes(cut / "checkpoints" / "ckpt_14", straight / "checkpoints" / "ckpt_14")
    assert [record["samples"] for record in metrics(cut)] == np.cumsum(SIZES).tolist()
    assert json.loads((cut / "results.json").read_text())["microsteps"] == sum(SIZES) // 2


@pytest.mark.parametrize("workers", [2])
def test_workers_share_the_same_growing_batches(data: Path, model: Path, tmp_path: Path, workers: int) -> None:
    """They take micro-batches in turn; the losses differ only by rounding."""
    values = {"record_samples": True, "disable_dropout": True, "precision": "fp64"}
    one, many = run(data, model, tmp_path / "1", **values), run(data, model, tmp_path / "n", workers, **values)
    order = SampleOrder(np.array([37, 40, 23, 31]), seed=12349, global_batch_size=16, ramp=BatchRamp(6, 4))
    for rank in range(workers):
        for record in map(json.loads, (many / f"samples-{rank}.jsonl").read_text().splitlines()):
            samples = order.step(record["step"])
            whole = np.stack([samples.shard, samples.row], axis=1).reshape(-1, workers, 2, 2)
            assert record["samples"] == whole[:, rank].reshape(-1, 2).tolist()
    losses = [[record["loss"] for record in metrics(out)] for out in (one, many)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-8)


def test_a_ramp_that_cannot_be_is_one_line(data: Path, model: Path, tmp_path: Path) -> None:
    given = {**GIVEN, "data_dir": data, "model_config": model, "output_dir": tmp_path, "grad_accum_usteps": 8}
    refused = train(**{**given, "batch_ramp_parts": 3})
    assert_one_line_error(refused, "global_batch_size / batch_ramp_parts = 16 / 3 is not a multiple of 2")
    refused = train(**{**given, "batch_size": 8, "grad_accum_usteps": 2})
    assert_one_line_error(refused, "16 / 4 is not a multiple of 8")
    assert_one_line_error(train(**{**given, "batch_ramp_parts": 1}), "--batch_ramp_parts is 1; allowed", "2 or more")
    run(data, model, tmp_path, steps_this_run=3)
    changed = train(**{**given, "batch_ramp_steps": 8, "resume_ckpt": True})
    assert_one_line_error(changed, "batch_ramp_steps = 6, this run has 8")
