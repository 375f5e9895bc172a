"""Global batches that grow: which samples are read at which step, exact resumes, any number of workers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.checkpoints import snapshot
from tests.helpers.support import assert_one_line_error, assert_resumed, assert_same_bytes, metrics, train
from trainer.data.batch_ramp import BatchRamp, BatchSizes
from trainer.data.order import SampleOrder

GIVEN: dict[str, Any] = {
    "batch_size": 2, "warmup_steps": 2, "max_pred_len": 5, "device": "cpu", "lr": 3e-3, "ckpt_interval_steps": 0,
    "precision": "fp32", "batch_ramp_steps": 6, "batch_ramp_parts": 4, "max_steps": 14,
}  # fmt: skip
#: Sizes for a batch of 16 in 4 parts over 6 steps, counted by hand: one more part every second step, then all.
SIZES = [4, 4, 8, 8, 12, 12, *[16] * 8]


def positions(rows: int, sizes: list[int] = SIZES) -> list[tuple[int, range]]:
    """The epoch of each batch, and its samples' positions in the epoch: a batch that does not fit ends the epoch."""
    found, epoch, at = [], 0, 0
    for size in sizes:
        if at + size > rows:
            epoch, at = epoch + 1, 0
        found.append((epoch, range(at, at + size)))
        at += size
    return found


@pytest.mark.parametrize("rows", [[131], [37, 40, 23, 31], [16], [19]])
def test_the_samples_of_each_step_are_those_of_an_independent_count(rows: list[int]) -> None:
    """Compared with the order of single samples, which knows nothing of batches."""
    single = SampleOrder(np.array(rows), seed=3, sizes=[BatchSizes(1)])
    order = SampleOrder(np.array(rows), seed=3, sizes=[BatchSizes(16, BatchRamp(6, 4))])
    total = sum(rows)
    for step, (epoch, places) in enumerate(positions(total)):
        wanted = [single.step(epoch * total + place) for place in places]
        found = order.step(step)
        assert list(zip(found.shard, found.row, strict=True)) == [(s.shard[0], s.row[0]) for s in wanted]
        assert (order.epoch_of(step), order.batch_size(step)) == (epoch, SIZES[step])
    together = order.steps(0, len(SIZES))
    np.testing.assert_array_equal(together.row, np.concatenate([order.step(step).row for step in range(len(SIZES))]))


def test_batches_of_another_size_continue_in_the_epoch() -> None:
    """Skipped batches, in the ramp and right after a change, keep the sizes that they had: steps 0 to 8 use batches 0
    to 9 without batch 4, steps 9 to 14 batches 10 to 16 without batch 10."""
    rows, sizes = [37, 40, 23, 31], [*SIZES[:10], *[12] * 7, *[6] * 30]
    single = SampleOrder(np.array(rows), seed=3, sizes=[BatchSizes(1)])
    earlier = [BatchSizes(16, BatchRamp(6, 4), end=10), BatchSizes(12, end=17)]
    order = SampleOrder(np.array(rows), seed=3, sizes=[*earlier, BatchSizes(6)], skipped=[4, 10])
    used = [(size, *place) for batch, (size, place) in enumerate(zip(sizes, positions(131, sizes), strict=True))
            if batch not in (4, 10)]  # fmt: skip
    for step, (size, epoch, places) in enumerate(used):
        wanted = [single.step(epoch * 131 + place) for place in places]
        found = order.step(step)
        assert list(zip(found.shard, found.row, strict=True)) == [(s.shard[0], s.row[0]) for s in wanted]
        assert (order.epoch_of(step), order.batch_size(step)) == (epoch, size)


def test_the_sizes_before_each_change_are_those_of_the_record() -> None:
    """Of two changes at one batch only the last has had any effect."""
    state = snapshot(110).state
    state = dataclasses.replace(
        state,
        step=10,
        global_batch_size=8,
        settings={"batch_ramp_steps": 0, "batch_ramp_parts": 4},
        changes=[
            {"step": 105, "name": "batch_ramp_steps", "old": 6, "new": 0, "batch": 6},
            {"step": 105, "name": "lr", "old": 1e-3, "new": 1e-4},
            {"step": 107, "name": "weight_decay", "old": 0.1, "new": 0.0},
            {"step": 108, "name": "global_batch_size", "old": 16, "new": 12, "batch": 9},
            {"step": 108, "name": "global_batch_size", "old": 12, "new": 8, "batch": 9},
        ],
    )
    assert state.batch_sizes() == [
        BatchSizes(16, BatchRamp(6, 4), end=6),
        BatchSizes(16, BatchRamp(0, 4), end=9),
        BatchSizes(8, BatchRamp(0, 4)),
    ]


def test_a_resumed_run_with_another_batch_and_less_data_has_an_order() -> None:
    """The earlier batch is larger than the whole data set."""
    order = SampleOrder(np.array([10]), seed=3, sizes=[BatchSizes(16, end=3), BatchSizes(4)])
    for step in range(3, 9):
        assert len(set(order.step(step).row.tolist())) == 4


@pytest.mark.parametrize("workers", [1, 2])
def test_a_resumed_run_may_change_the_batch_and_reads_on_where_it_was(
    data: Path, model: Path, tmp_path: Path, workers: int
) -> None:
    """Twice: in the middle of the ramp, and after it. Each change is recorded, so a later resume is exact, too."""
    allowed = ("global_batch_size", "batch_ramp_steps", "lr")
    out, options = tmp_path / "out", {"record_samples": True, "allow_changes": allowed}
    whole, smaller = {"batch_ramp_steps": 0, "grad_accum_usteps": 8 // workers}, {"grad_accum_usteps": 4 // workers}
    run(data, model, out, workers, steps_this_run=3, record_samples=True)
    for values in (whole, {**whole, **smaller, "lr": 1e-3}):
        for _ in range(2):
            before = metrics(out)[-1]["step"]
            run(data, model, out, workers, **{**values, **options, "steps_this_run": before + 2, "resume_ckpt": True})
    sizes = [4, 4, 8, *[16] * 4, *[8] * 4]
    assert [record["samples"] for record in metrics(out)] == np.cumsum(sizes).tolist()
    single = SampleOrder(np.array([37, 40, 23, 31]), seed=12349, sizes=[BatchSizes(1)])
    wanted = [
        [[int(s.shard[0]), int(s.row[0])] for s in (single.step(epoch * 131 + place) for place in places)]
        for epoch, places in positions(131, sizes)
    ]
    read = dict[int, list[list[int]]]()
    for rank in range(workers):
        for record in map(json.loads, (out / f"samples-{rank}.jsonl").read_text().splitlines()):
            read.setdefault(record["step"], []).extend(record["samples"])
    assert {step: sorted(samples) for step, samples in read.items()} == dict(enumerate(map(sorted, wanted)))
    changes = json.loads((out / "results.json").read_text())["changes"]
    assert {change["name"]: change.get("batch") for change in changes} == {
        "batch_ramp_steps": 3, "global_batch_size": 7, "lr": None,
    }  # fmt: skip


def run(data: Path, model: Path, out: Path, workers: int = 1, **values: Any) -> Path:
    given = {**GIVEN, "grad_accum_usteps": 8 // workers, **values}
    done = train(workers, data_dir=data, model_config=model, output_dir=out, **given)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_resumed(done, given)
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
    order = SampleOrder(np.array([37, 40, 23, 31]), seed=12349, sizes=[BatchSizes(16, BatchRamp(6, 4))])
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
