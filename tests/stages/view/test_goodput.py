"""The ledger of a training run's time: every second belongs to one part, and the parts are what happened."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path

import pytest

from common.files import METRICS
from stages.directory.attempts import Attempt, How
from stages.view.curves import NAMES, Curves, MetricsFile
from stages.view.goodput import Goodput, goodput, goodput_of
from tests.helpers.stores.machine import checkpoint_of, write
from trainer.checkpoint.directory import CHECKPOINTS, set_aside


def curves(*steps: dict[str, float]) -> Curves:
    """Steps with a `time` and any of the fields of metrics.jsonl."""
    found = Curves()
    for number, step in enumerate(steps, 1):
        found.steps.append(number)
        found.times.append(step["time"])
        for name in NAMES:
            found.values[name].append(step.get(name, math.nan))
    return found


def parts(found: Goodput) -> dict[str, float]:
    return {part: round(seconds, 6) for part, seconds in found.seconds.items() if seconds}


def test_an_undisturbed_training() -> None:
    attempts = [Attempt(100.0, 120.0, "complete")]
    steps = curves(
        {"time": 108.0, "step_time_s": 3.0},
        {"time": 112.0, "step_time_s": 4.0, "data_wait_s": 0.5, "checkpoint_stall_s": 1.0},
        {"time": 115.0, "step_time_s": 3.0},
    )
    found = goodput(attempts, steps)
    assert parts(found) == {
        "starting": 5.0, "computing": 8.5, "waiting for data": 0.5, "waiting for checkpoints": 1.0, "ending": 5.0,
    }  # fmt: skip
    assert found.total_s == 20.0
    assert found.share == 8.5 / 20
    assert [part for part, _ in found.losses][:2] in (["starting", "ending"], ["ending", "starting"])
    assert str(found).startswith("goodput 42.5%; lost: ")


def test_a_kill_costs_the_steps_since_the_last_checkpoint_and_the_time_until_the_next_start() -> None:
    """For the steps after the checkpoint, only the second attempt's records are left."""
    attempts = [Attempt(0.0, 30.0, "killed"), Attempt(45.0, 60.0, "complete")]
    steps = curves(
        {"time": 10.0, "step_time_s": 5.0},
        {"time": 15.0, "step_time_s": 5.0},
        {"time": 54.0, "step_time_s": 5.0},  # was also done at 20 and 25
        {"time": 59.0, "step_time_s": 5.0},
    )
    assert parts(goodput(attempts, steps)) == {
        "starting": 5.0 + 4.0, "computing": 20.0, "steps done again": 15.0, "down": 15.0, "ending": 1.0,
    }  # fmt: skip


def test_waits_before_a_start_are_no_downtime() -> None:
    """5 s down, 10 s in a queue, 3 s down, 4 s of a download that lasts until the start."""
    queue, download = ("waiting in a queue", 35.0, 45.0), ("downloading", 48.0, 52.0)
    attempts = [
        Attempt(10.0, 30.0, "killed", waits=(("waiting in a queue", 2.0, 9.5),)),
        Attempt(52.0, 60.0, "complete", waits=(queue, download)),
    ]
    steps = curves({"time": 30.0, "step_time_s": 20.0}, {"time": 60.0, "step_time_s": 8.0})
    found = goodput(attempts, steps)
    assert parts(found) == {
        "waiting in a queue": 7.5 + 10.0, "downloading": 4.0, "down": 0.5 + 5.0 + 3.0, "computing": 28.0,
    }  # fmt: skip
    assert found.total_s == 58.0


def test_waits_that_overlap_count_once() -> None:
    waits = (("downloading", 1.0, 8.0), ("downloading", 4.0, 9.0), ("waiting in a queue", 0.0, 20.0))
    found = goodput([Attempt(10.0, 12.0, "complete", waits=waits)], curves({"time": 12.0, "step_time_s": 2.0}))
    assert found.total_s == 12.0
    assert parts(found)["downloading"] == 8.0


@pytest.mark.parametrize(("how", "part"), [("failed", "steps done again"), ("hung", "steps done again"),
                                           ("interrupted", "ending"), ("running", "ending")])  # fmt: skip
def test_what_comes_after_the_last_step_depends_on_how_it_ended(how: How, part: str) -> None:
    assert parts(goodput([Attempt(0.0, 10.0, how)], curves({"time": 4.0, "step_time_s": 4.0}))) == {
        "computing": 4.0,
        part: 6.0,
    }


def test_an_attempt_without_a_step_that_counted_is_lost() -> None:
    attempts = [Attempt(0.0, 8.0, "killed"), Attempt(8.0, 14.0, "complete")]
    found = goodput(attempts, curves({"time": 14.0, "step_time_s": 2.0}))
    assert parts(found) == {"steps done again": 8.0, "starting": 4.0, "computing": 2.0}
    assert parts(goodput([Attempt(0.0, 8.0, "running")], curves())) == {"starting": 8.0}
    assert goodput([Attempt(0.0, 8.0, "running")], curves()).share is None
    assert str(goodput([], curves())) == ""


def test_steps_that_were_given_up_in_a_process_are_lost() -> None:
    """After a non-finite step, training goes back to the last checkpoint."""
    steps = curves({"time": 3.0, "step_time_s": 2.0}, {"time": 12.0, "step_time_s": 2.0})
    assert parts(goodput([Attempt(0.0, 12.0, "complete")], steps)) == {
        "starting": 1.0, "computing": 4.0, "steps done again": 7.0,
    }  # fmt: skip


def test_what_a_step_with_a_new_graph_takes_more_is_compilation() -> None:
    times = [{"time": 20.0, "step_time_s": 18.0, "compiled_graphs": 2.0}]
    times += [{"time": 22.0 + 2 * n, "step_time_s": 2.0, "compiled_graphs": 2.0} for n in range(8)]
    assert parts(goodput([Attempt(0.0, 36.0, "complete")], curves(*times))) == {
        "starting": 2.0, "compiling": 16.0, "computing": 18.0,
    }  # fmt: skip


def test_steps_of_another_training_or_machine_do_not_count() -> None:
    """An extended training run has the records of the one that it continues from."""
    steps = curves({"time": 50.0, "step_time_s": 5.0}, {"time": 110.0, "step_time_s": 5.0})
    assert parts(goodput([Attempt(100.0, 110.0, "complete")], steps)) == {"starting": 5.0, "computing": 5.0}


@pytest.mark.parametrize("seed", range(50))
def test_every_second_belongs_to_one_part(seed: int) -> None:
    """Whatever the clocks and records say."""
    rng = random.Random(seed)
    attempts, steps, at = [], [], 1000.0
    for number in range(rng.randint(1, 5)):
        waits = [("downloading", at + rng.uniform(-2, 9), at + rng.uniform(-2, 30)) for _ in range(rng.randint(0, 3))]
        began = at = at + rng.uniform(0, 20)
        for _ in range(rng.randint(0, 6)):
            at += rng.uniform(0, 5)
            field = {name: rng.uniform(0, 6) for name in ("step_time_s", "data_wait_s", "checkpoint_stall_s")}
            steps.append({"time": at + rng.uniform(-1, 1), "compiled_graphs": float(number), **field})
        at += rng.uniform(0, 5)
        how: How = rng.choice(["killed", "complete", "interrupted", "hung"])
        attempts.append(Attempt(began, at, how, waits=tuple(waits)))
    steps.sort(key=lambda step: step["time"])
    found = goodput(attempts, curves(*steps))
    assert all(seconds >= 0 for seconds in found.seconds.values())
    first = min([attempts[0].started, *(began for _, began, _ in attempts[0].waits)])
    assert math.isclose(found.total_s, attempts[-1].ended - first, abs_tol=1e-6)


def test_in_a_manifest_the_largest_part_comes_first() -> None:
    attempts = [Attempt(0.0, 100.0, "interrupted"), Attempt(105.0, 115.0, "complete")]
    steps = curves({"time": 97.0, "step_time_s": 2.0}, {"time": 113.0, "step_time_s": 5.0})
    found = {part: seconds for part, seconds in goodput(attempts, steps).record()["seconds"].items() if seconds}
    assert list(found.items()) == [("starting", 98.0), ("computing", 7.0), ("ending", 5.0), ("down", 5.0)]


@pytest.fixture
def training(tmp_path: Path) -> Path:
    """A training that has done 6 steps of 5 s each, with a checkpoint at step 3 and one at step 6."""
    for step in (3, 6):
        write(tmp_path / CHECKPOINTS / f"ckpt_{step}", checkpoint_of(step))
    record(tmp_path, {step: 5.0 * step for step in range(1, 7)})
    return tmp_path


def record(directory: Path, times: dict[int, float]) -> None:
    """Records of 5 s for these steps."""
    lines = [json.dumps({"step": step, "time": time, "step_time_s": 5.0}) for step, time in times.items()]
    (directory / METRICS).write_text("\n".join([*lines, ""]))


def spent(directory: Path, *attempts: Attempt) -> dict[str, float]:
    return parts(goodput_of(directory, attempts, MetricsFile(directory / METRICS).read()))


def test_steps_that_were_set_aside_after_a_clean_interruption_were_done_again(training: Path) -> None:
    """As by a rollback, or because the newest checkpoint was damaged."""
    first, places = Attempt(0.0, 31.0, "interrupted"), training / CHECKPOINTS
    assert spent(training, first) == {"computing": 30.0, "ending": 1.0}
    assert set_aside(places, [places / "ckpt_6"], training / METRICS) is not None
    record(training, {1: 5.0, 2: 10.0, 3: 15.0, 4: 46.0, 5: 51.0, 6: 56.0})
    write(places / "ckpt_6", checkpoint_of(6))
    second = Attempt(40.0, 58.0, "complete")
    assert spent(training, first, second) == {
        "computing": 30.0, "steps done again": 16.0, "down": 9.0, "starting": 1.0, "ending": 2.0,
    }  # fmt: skip
    # From there on to the first step: nothing of the first attempt counts.
    assert set_aside(places, [places / "ckpt_6", places / "ckpt_3"], training / METRICS) is not None
    record(training, {step: 100 + 5.0 * step for step in range(1, 7)})
    third = Attempt(100.0, 130.0, "complete")
    assert spent(training, first, dataclasses.replace(second, how="interrupted"), third) == {
        "steps done again": 31.0 + 18.0, "down": 9.0 + 42.0, "computing": 30.0,
    }  # fmt: skip


def test_steps_after_the_newest_checkpoint_of_a_killed_training_do_not_count(training: Path) -> None:
    record(training, {step: 5.0 * step for step in range(1, 9)})
    assert spent(training, Attempt(0.0, 42.0, "killed")) == {"computing": 30.0, "steps done again": 12.0}
    assert spent(training, Attempt(0.0, 42.0, "running")) == {"computing": 40.0, "ending": 2.0}
    (training / CHECKPOINTS / "ckpt_6" / "model").write_bytes(b"")
    assert spent(training, Attempt(0.0, 42.0, "interrupted")) == {"computing": 15.0, "steps done again": 27.0}
