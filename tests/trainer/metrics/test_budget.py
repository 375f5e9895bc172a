"""Training for a set time: the steps that fit are measured, then fixed, and measuring leaves no trace in the training.

No test depends on how fast the machine is: what is measured is compared with nothing.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest

from common.duration import Duration
from common.errors import AgreedError, Interrupted
from tests.helpers.support import assert_one_line_error, assert_same_bytes, losses, metrics, train
from trainer.build import mask_rate_steps
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.resume_point import agree_on_start, checkpoint_directory
from trainer.checkpoint.stable import stable_step
from trainer.config import TrainConfig
from trainer.data.batch_ramp import BatchRamp
from trainer.data.mask_rate import MaskRate
from trainer.data.masking import Masking
from trainer.devices.cpu import CpuDevice
from trainer.metrics import rehearsal
from trainer.metrics.budget import BUDGET, Pace, fixed_steps, recorded_steps, require_enough, steps_within
from trainer.parallel.mesh import Mesh
from trainer.registry import SCHEDULES
from trainer.run import Run

T = TypeVar("T")

COMMON = {
    "batch_size": 4, "lr": 3e-3, "warmup_steps": 5, "max_pred_len": 5, "device": "cpu", "precision": "fp32",
    "num_ckpts_to_keep": -1, "ckpt_interval_steps": 3,
}  # fmt: skip
#: Long enough for `LEAST_STEPS` on any machine. Training stops long before.
LONG = "2m"


def run(data: Path, model: Path, out: Path, *, workers: int = 1, status: int = 0, **values: Any) -> str:
    """Train with 16 sequences a step; returns what was said."""
    copies = workers // values.get("tensor_parallel_size", 1)
    given = {"grad_accum_usteps": 4 // copies, **COMMON, **values}
    done = train(workers, data_dir=data, model_config=model, output_dir=out, **given)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def assert_same_training(ours: Path, theirs: Path, step: int) -> None:
    """Checkpoints, with the state beside the tensors, and the record of every step."""
    mine, other = (out / "checkpoints" / f"ckpt_{step}" for out in (ours, theirs))
    assert_same_bytes(mine, other)
    assert (mine / "state.json").read_bytes() == (other / "state.json").read_bytes()
    same = ("step", "epoch", "samples", "loss", "learning_rate", "grad_norm")
    records = [[{key: record[key] for key in same} for record in metrics(out)] for out in (ours, theirs)]
    assert records[0] == records[1]


@pytest.fixture(scope="module")
def measured(data: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training that was killed as soon as its number of steps was recorded; the record is then set to 14 by hand, as
    another machine may have measured."""
    out = tmp_path_factory.mktemp("measured") / "out"
    said = run(data, model, out, budget=LONG, status=-9, env={"FAILPOINT": f"rename-after:{BUDGET}"})
    assert "measuring the time of a step" in said
    assert not list(out.glob("checkpoints/ckpt_*"))
    assert not (out / "progress.json").exists()
    record = json.loads((out / BUDGET).read_text())
    record["1"]["max_steps"] = 14
    (out / BUDGET).write_text(json.dumps(record))
    return out


@pytest.mark.parametrize(
    ("workers", "values"),
    [
        (1, {}), (2, {}), (1, {"batch_ramp_steps": 8}),
        *(
            pytest.param(workers, values, marks=pytest.mark.slow)
            for workers, values in (
                (2, {"tensor_parallel_size": 2}), (2, {"data_parallel": "ddp"}), (1, {"optimizer": "Muon"})
            )
        ),
    ],
)  # fmt: skip
def test_a_measured_training_ends_with_the_bytes_of_one_of_as_many_steps(
    data: Path, model: Path, tmp_path: Path, workers: int, values: dict[str, Any]
) -> None:
    """With dropout, into the second epoch. The rate follows the number of steps: another number gives other bytes."""
    values = {"workers": workers, "steps_this_run": 10, **values}
    said = run(data, model, tmp_path / "measured", budget=LONG, **values)
    steps = fixed_steps(tmp_path / "measured", 1)
    assert steps is not None
    assert f"budget 2m: {steps} steps of" in said
    run(data, model, tmp_path / "given", max_steps=steps, **values)
    assert_same_training(tmp_path / "measured", tmp_path / "given", 10)
    assert not list((tmp_path / "measured").glob("*.tmp"))


def test_phase_2_has_a_budget_of_its_own(data: Path, model: Path, tmp_path: Path) -> None:
    run(data, model, tmp_path / "first", max_steps=6)
    start = tmp_path / "first" / "checkpoints" / "ckpt_6"
    phase2 = {"phase2": True, "phase1_end_step": 6, "resume_ckpt_path": start, "steps_this_run": 3}
    run(data, model, tmp_path / "measured", budget=LONG, **phase2)
    steps = fixed_steps(tmp_path / "measured", 2)
    assert fixed_steps(tmp_path / "measured", 1) is None
    run(data, model, tmp_path / "given", max_steps=steps, **phase2)
    assert_same_training(tmp_path / "measured", tmp_path / "given", 9)


def test_the_recorded_steps_count_whatever_interrupts_the_training(
    data: Path, model: Path, measured: Path, tmp_path: Path
) -> None:
    """Killed before the first checkpoint, between two, and stopped; nothing is measured again, not even on another
    machine."""
    out = tmp_path / "out"
    shutil.copytree(measured, out)
    again = {"budget": LONG, "resume_ckpt": True}
    for point, action, status in (("step:2.0", "kill", -9), ("step:8.0", "kill", -9), ("step:11.0", "terminate", 75)):
        said = run(data, model, out, **again, status=status, env={"FAILPOINT": point, "FAILPOINT_ACTION": action})
        assert "budget 2m: 14 steps, as measured when the phase began" in said
        assert "measuring the time" not in said
    assert "[14/14," in run(data, model, out, **again)
    run(data, model, tmp_path / "given", max_steps=14)
    assert_same_training(out, tmp_path / "given", 14)
    # It is the same training, so it also continues with the number.
    run(data, model, out, max_steps=14, resume_ckpt=True)


def test_what_is_killed_before_the_record_is_measured_again(data: Path, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for point in ("micro-step:1.0.0", "budget:measured", f"rename-before:{BUDGET}"):
        run(data, model, out, budget=LONG, status=-9, env={"FAILPOINT": point})
        assert fixed_steps(out, 1) is None
    said = run(data, model, out, budget=LONG, steps_this_run=1)
    assert "measuring the time of a step" in said
    assert len(losses(out)) == 1


def test_a_signal_ends_the_measuring_and_leaves_nothing(data: Path, model: Path, tmp_path: Path) -> None:
    env = {"FAILPOINT": "step:2.1", "FAILPOINT_ACTION": "terminate"}
    said = run(data, model, tmp_path / "out", workers=2, budget=LONG, status=75, env=env)
    assert "stopped as asked; the time of a step was not measured yet" in said
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["lock"]


def test_a_training_with_other_options_is_measured_until_one_has_a_checkpoint(
    data: Path, model: Path, measured: Path, tmp_path: Path
) -> None:
    """Whoever changes an option after a kill at the very start begins another training."""
    out = tmp_path / "out"
    shutil.copytree(measured, out)
    assert "measuring" in run(data, model, out, budget=LONG, lr=1e-3, steps_this_run=2)
    shutil.copy(measured / BUDGET, out / BUDGET)
    refused = run(data, model, out, budget=LONG, lr=2e-3, resume_ckpt=True, status=1)
    assert "measuring" not in refused
    assert "lr = 0.001, this run has 0.002" in refused


def test_a_batch_that_is_not_finite_does_not_hinder_measuring(data: Path, model: Path, tmp_path: Path) -> None:
    env = {"FAILPOINT": "batch:1.0", "FAILPOINT_ACTION": "damage"}
    said = run(data, model, tmp_path / "out", budget=LONG, steps_this_run=3, env=env)
    assert "continuing without batch 1" in said
    assert np.isfinite(losses(tmp_path / "out")).all()


def test_its_stable_part_can_be_continued(data: Path, model: Path, tmp_path: Path) -> None:
    """By the next night: the state has the number of steps that was measured."""
    run(data, model, tmp_path, budget=LONG, schedule="wsd", steps_this_run=3)
    assert stable_step(tmp_path / "checkpoints" / "ckpt_3") == 3


def test_a_trial_is_not_measured(data: Path, model: Path, tmp_path: Path) -> None:
    said = run(data, model, tmp_path / "out", budget=LONG, trial=True, steps_this_run=2, warmup_steps=100_000)
    assert "measuring" not in said
    assert not (tmp_path / "out" / BUDGET).exists()


@pytest.mark.parametrize("budget", ["20", "m", "0s", "1.5h", "20 m", "20M", "1h30m", ""])
def test_another_form_is_refused(data: Path, model: Path, tmp_path: Path, budget: str) -> None:
    done = train(data_dir=data, model_config=model, output_dir=tmp_path / "out", **COMMON, budget=budget)
    assert_one_line_error(done, "--budget is", "allowed: a time such as 90s, 20m, 8h or 1d")


def test_a_budget_that_cannot_be_kept_is_one_line(data: Path, model: Path, measured: Path, tmp_path: Path) -> None:
    def refused(out: Path, *fragments: str, **values: Any) -> None:
        given = {**COMMON, "grad_accum_usteps": 4, "data_dir": data, "model_config": model, "output_dir": out, **values}
        assert_one_line_error(train(**given), *fragments)

    refused(tmp_path / "both", "--budget and --max_steps exclude each other", budget="20m", max_steps=5)
    too_short = ("--budget 2m is too short: a step takes", "steps fit, fewer than warmup_steps = 99999999")
    refused(tmp_path / "warm", *too_short, budget=LONG, warmup_steps=99_999_999)
    assert not list(tmp_path.glob(f"*/{BUDGET}"))
    run(data, model, tmp_path / "steps", max_steps=2, warmup_steps=0)
    refused(tmp_path / "steps", "has begun with --max_steps; continue with that", budget="20m", resume_ckpt=True)
    begun = tmp_path / "steps" / "checkpoints" / "ckpt_2"
    said = (f"--budget is for a whole phase, and {begun} is of step 2 of this phase; give --max_steps",)
    refused(tmp_path / "behind", *said, budget="20m", resume_ckpt_path=begun)
    assert not (tmp_path / "behind" / BUDGET).exists()
    out = tmp_path / "other"
    shutil.copytree(measured, out)
    run(data, model, out, budget=LONG, steps_this_run=2)
    refused(out, "--budget 20m: the training in", "has begun with --budget 2m", budget="20m", resume_ckpt=True)


PACE = Pace(step_s=0.5, check_s=0.125, copy_s=0.25, spent_s=8.0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ckpt_interval_steps": 7},
        {"batch_ramp_steps": 40, "batch_ramp_parts": 4},
        {"batch_ramp_steps": 100_000, "batch_ramp_parts": 4, "replica_check_steps": 3},
        {"ckpt_interval_steps": 5, "replica_check_steps": 3},
    ],
)
def test_as_many_steps_as_fit(options: dict[str, int]) -> None:
    """Compared with a training clocked step by step."""
    config = TrainConfig(**{"ckpt_interval_steps": 0, "replica_check_steps": 0, **options})
    ramp = BatchRamp(config.batch_ramp_steps, config.batch_ramp_parts)

    def times() -> Iterator[float]:
        now, step = PACE.spent_s, 0
        while True:
            now += PACE.step_s * ramp.size(step, 64) / 64
            step += 1
            if config.ckpt_interval_steps > 0 and step % config.ckpt_interval_steps == 0:
                now += PACE.check_s + PACE.copy_s
            if config.replica_check_steps and step % config.replica_check_steps == 0:
                now += PACE.check_s
            yield now

    for budget in (60, 333):
        expected = next(done for done, now in enumerate(times()) if now > budget)
        assert steps_within(budget, PACE, config, 64, compares=True) == expected
    assert steps_within(5, PACE, config, 64, compares=True) == 0


def test_checkpoints_by_the_clock_take_their_time_too() -> None:
    """Each minute of training is followed by a pause of 0.375 s."""
    config = TrainConfig(ckpt_interval_steps=0, ckpt_interval_minutes=1)
    trained = (3608 - PACE.spent_s) / (1 + 0.375 / 60)
    assert steps_within(3608, PACE, config, 64, compares=False) == int(trained / PACE.step_s)


def test_too_few_steps_say_what_was_measured() -> None:
    config = TrainConfig(budget=Duration.parse("10s"), warmup_steps=0)
    require_enough(config, PACE, 10)
    with pytest.raises(AgreedError, match=r"a step takes 0\.5 s and 0:08 are spent before the first, so 9 steps fit"):
        require_enough(config, PACE, 9)


def test_the_warm_up_must_end_before_the_decay() -> None:
    config = TrainConfig(budget=Duration.parse("10s"), warmup_steps=16, schedule="wsd", decay_share=0.2)
    require_enough(config, PACE, 20)
    with pytest.raises(AgreedError, match="19 steps fit, 15 of them before the decay, fewer than warmup_steps = 16"):
        require_enough(config, PACE, 19)
    with pytest.raises(AgreedError, match="so 15 steps fit, 12 of them before"):
        require_enough(config, PACE, 15)


def test_the_first_steps_are_not_timed_and_requests_to_save_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first three take 100 s each, including compilation, the others 2 s. At least 20 s are timed."""
    now = [0.0]
    monkeypatch.setattr(rehearsal, "time", SimpleNamespace(monotonic=lambda: now[0]))
    taken: list[bool] = []
    asked: Any = SimpleNamespace(must_stop=False, take_save=lambda: taken.append(True))
    waits: list[bool] = []

    def worker(is_root: bool) -> Any:
        return SimpleNamespace(is_root=is_root, device=SimpleNamespace(finish_closures=lambda: waits.append(is_root)))

    root = worker(is_root=True)
    clock = rehearsal._Clock(asked, 20.0, root, lambda: None)
    other = rehearsal._Clock(asked, 20.0, worker(is_root=False), lambda: None)
    other.take_save()
    steps = 0
    assert not clock.take_save()
    while not clock.must_stop:
        now[0] += 100.0 if steps < 3 else 2.0
        steps += 1
        assert not clock.take_save()
        other.take_save()
    clock.end()
    other.end()
    assert (steps, clock.step_s) == (13, 2.0)
    assert other.step_s is None
    assert waits.count(True) == waits.count(False), "a worker that alone waits for the device would wait for the others"
    # Slow steps: five of them are enough.
    clock, steps = rehearsal._Clock(asked, 1.0, root, lambda: None), -1
    while not clock.must_stop:
        now[0] += 60.0
        steps += 1
        clock.take_save()
    clock.end()
    assert (steps, clock.step_s) == (8, 60.0)
    assert not taken


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_steps_are_timed_at_the_mean_masking_rate_and_with_as_many_positions_at_most(
    tmp_path: Path, schedule: str
) -> None:
    """The mean is over each step of a whole phase; the training itself keeps its rate."""
    config = TrainConfig(schedule=schedule, budget=Duration.parse("20m"), output_dir=tmp_path, warmup_steps=0)
    workload: Any = SimpleNamespace(masking=Masking(MaskRate(0.3, 0.15)))
    seen: list[Run] = []

    def make_trainer(run: Run, requests: Any) -> Any:
        seen.append(run)
        raise Interrupted("")

    nothing: Any = SimpleNamespace()
    with pytest.raises(Interrupted):
        rehearsal._measure(Run(config, workload, nothing, nothing, print), nothing, make_trainer)
    (run,) = seen
    falling = mask_rate_steps(config.lasting(10_000))
    mean = np.mean([workload.masking.rate.at(step, falling) for step in range(10_000)])
    assert run.workload.masking is not None
    rate = run.workload.masking.rate
    assert [rate.at(step, mask_rate_steps(run.config)) for step in (0, 1000)] == pytest.approx([mean] * 2, rel=1e-3)
    assert rate.most(128, 2) == workload.masking.rate.most(128, 2)
    assert workload.masking.rate == MaskRate(0.3, 0.15)


def test_phase_2_is_measured_in_phase_1s_directory(tmp_path: Path) -> None:
    """The rehearsal begins with initial weights, whatever checkpoints are there: damaged ones are not even read."""
    (tmp_path / "checkpoints" / "ckpt_6").mkdir(parents=True)
    config = TrainConfig(
        phase=2, phase1_end_step=6, resume=True, budget=Duration.parse("20m"), output_dir=tmp_path, warmup_steps=0
    )
    assert recorded_steps(config, {}) is None
    said: list[str] = []

    def make_trainer(run: Run, requests: Any) -> Any:
        manager = CheckpointManager(checkpoint_directory(run.config), keep=2, log=said.append)
        assert agree_on_start(run.config, manager, Mesh(), said.append) is None
        raise Interrupted("")

    nothing: Any = SimpleNamespace()
    workload: Any = SimpleNamespace(masking=None)
    with pytest.raises(Interrupted):
        rehearsal._measure(Run(config, workload, nothing, nothing, print), nothing, make_trainer)
    assert not said


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("20m", 1200), ("8h", 28800), ("1d", 86400), ("7m", 420)])
def test_a_duration_is_read_and_written(text: str, seconds: int) -> None:
    assert Duration.parse(text) == seconds
    assert str(Duration.parse(text)) == text
    assert f"{Duration.parse(f'{seconds}s')}" == text


@dataclass(frozen=True)
class Played(Mesh):
    """The root of several workers, without the others."""

    def by_root(self, work: Callable[[], T]) -> T:
        return work()

    def broadcast_object(self, value: T | None) -> T | None:
        return value


@pytest.mark.parametrize(("workers", "size", "steps"), [(2, 2, 400), (2, 1, 400), (1, 1, 600)])
def test_each_comparison_of_workers_takes_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, size: int, steps: int
) -> None:
    """Also those of the ranks of one model. A step takes 0.1 s, a comparison after each of them 0.05 s."""
    monkeypatch.setattr(rehearsal, "_measure", lambda *_: Pace(0.1, 0.05, 0.0, 0.0))
    config = TrainConfig(
        output_dir=tmp_path, budget=Duration.parse("60s"), replica_check_steps=1, ckpt_interval_steps=0,
        warmup_steps=0, tensor_parallel_size=size,
    )  # fmt: skip
    workload: Any = SimpleNamespace(describe=dict, settings=dict)
    mesh = Played(0, 0, workers, workers, size)
    unused: Any = None
    found = rehearsal.resolved(Run(config, workload, CpuDevice(), mesh, print), unused, unused)
    assert found.config.max_steps in (steps - 1, steps)  # sums of floats
