"""results.json covers the whole phase, however many processes took part in it."""

from __future__ import annotations

import collections
import json
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from common.errors import DiskError
from tests.helpers.checkpoints import snapshot
from tests.helpers.support import losses, metrics, train
from trainer.config import TrainConfig
from trainer.metrics.metrics import Metrics
from trainer.metrics.results import TrainTime
from trainer.metrics.trackers.tensorboard import EventFile

GIVEN: dict[str, Any] = {
    "batch_size": 4, "grad_accum_usteps": 2, "warmup_steps": 1, "max_pred_len": 5, "device": "cpu", "max_steps": 12,
    "ckpt_interval_steps": 4, "resume_ckpt": True,
}  # fmt: skip


def results(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "results.json").read_text())
    return found


def assert_of_whole_phase(out: Path, steps: int, first: int = 1) -> None:
    """results.json agrees with metrics.jsonl, which holds steps `first` … of the phase, each once."""
    records = [record for record in metrics(out) if record["step"] >= first]
    assert [record["step"] for record in records] == list(range(first, first + steps))
    found = results(out)
    assert (found["steps"], found["global_step"]) == (steps, first + steps - 1)
    assert (found["first_loss"], found["loss"]) == (records[0]["loss"], records[-1]["loss"])
    assert found["mean_loss_last_50"] == pytest.approx(np.mean([record["loss"] for record in records[-50:]]))
    rates = [record["throughput"] for record in records]
    assert found["throughput_average"] == pytest.approx(np.mean(rates))
    assert found["throughput_peak"] == max(rates)
    # The rest is saving and starting.
    assert 60 * found["train_time_minutes"] > 0.9 * sum(record["step_time_s"] for record in records)
    assert not (out / "progress.json").exists()


def test_files_that_cannot_be_written_at_the_end_are_refused_before_the_first_step(
    data: Path, model: Path, tmp_path: Path
) -> None:
    given = {**GIVEN, "data_dir": data, "model_config": model, "output_dir": tmp_path / "out"}
    (tmp_path / "bad.json").write_text('{"loss": 1}')
    for values, said in (
        ({"metrics_file": tmp_path / "none" / "r.json"}, "--metrics_file .* cannot be written; give a file in a"),
        ({"metrics_file": tmp_path}, "--metrics_file .* cannot be written"),
        ({"trial": True, "graphs": tmp_path / "none" / "g.json"}, "--graphs .* cannot be written"),
        ({"graphs": tmp_path / "bad.json"}, "--graphs .* is no list of graphs that --trial wrote; give another file"),
    ):
        done = train(**{**given, **values})
        assert done.returncode, done.stdout
        output = done.stdout + done.stderr
        errors = [line for line in output.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, output
        assert re.search(said, errors[0])
        assert "Traceback" not in output
    assert not list(tmp_path.glob("out/checkpoints/ckpt_*"))


def test_a_home_is_expanded(data: Path, model: Path, tmp_path: Path) -> None:
    """A shell does not, after `=`."""
    given = {**GIVEN, "data_dir": data, "model_config": model, "output_dir": tmp_path / "out", "max_steps": 2}
    done = train(env={"HOME": str(tmp_path)}, **given, metrics_file="~/results.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "results.json").read_text())["steps"] == 2


@pytest.mark.parametrize("point", ["training-end:saved", "training-end:timed", "write-before:results.json"])
def test_killed_between_the_last_checkpoint_and_the_results(
    data: Path, model: Path, tmp_path: Path, point: str
) -> None:
    given = {**GIVEN, "data_dir": data, "model_config": model, "output_dir": tmp_path}
    assert train(env={"FAILPOINT": point}, **given).returncode == -signal.SIGKILL
    assert (tmp_path / "checkpoints" / "ckpt_12" / "manifest.json").exists()
    assert not (tmp_path / "results.json").exists()
    done = train(**given)
    assert done.returncode == 0, done.stdout
    assert_of_whole_phase(tmp_path, 12)


def test_rate_and_time_are_those_of_all_attempts(data: Path, model: Path, tmp_path: Path) -> None:
    """Killed in step 7, stopped after step 9: the time of earlier attempts counts once, and each step once."""
    given = {**GIVEN, "data_dir": data, "model_config": model, "output_dir": tmp_path}
    assert train(env={"FAILPOINT": "step:7.0"}, **given).returncode == -signal.SIGKILL
    assert train(steps_this_run=9, **given).returncode == 0
    assert_of_whole_phase(tmp_path, 9)
    # As if they had taken this long: it counts once.
    (tmp_path / "train_time.json").write_text('{"1": 1000.0}')
    began = time.monotonic()
    assert train(**given).returncode == 0
    command_s = time.monotonic() - began
    assert_of_whole_phase(tmp_path, 12)
    last = sum(record["step_time_s"] for record in metrics(tmp_path)[9:])
    assert 0.9 * last < 60 * results(tmp_path)["train_time_minutes"] - 1000 < command_s


def test_a_finished_phase_that_is_run_again_keeps_its_results(data: Path, model: Path, tmp_path: Path) -> None:
    given = {**GIVEN, "data_dir": data, "model_config": model, "output_dir": tmp_path}
    assert train(**given).returncode == 0
    first = results(tmp_path)
    assert train(**given).returncode == 0
    again = results(tmp_path)
    assert again.pop("train_time_minutes") == pytest.approx(first.pop("train_time_minutes"), abs=0.02)
    assert again == first


def test_phase_2_in_the_directory_of_phase_1_has_results_of_its_own(data: Path, model: Path, tmp_path: Path) -> None:
    given = {**GIVEN, "data_dir": data, "model_config": model, "output_dir": tmp_path}
    assert train(**given).returncode == 0
    phase1 = 60 * results(tmp_path)["train_time_minutes"]
    done = train(**{**given, "phase2": True, "phase1_end_step": 12, "max_steps": 3, "warmup_steps": 0})
    assert done.returncode == 0, done.stdout
    assert_of_whole_phase(tmp_path, 3, first=13)
    assert results(tmp_path)["first_loss"] != losses(tmp_path)[0]
    times = json.loads((tmp_path / "train_time.json").read_text())
    assert times == {
        "1": pytest.approx(phase1, abs=1),
        "2": pytest.approx(60 * results(tmp_path)["train_time_minutes"], abs=1),
    }


def test_lost_records_are_null_and_not_those_of_other_steps(data: Path, model: Path, tmp_path: Path) -> None:
    given = {**GIVEN, "data_dir": data, "model_config": model, "output_dir": tmp_path}
    assert train(**{**given, "steps_this_run": 8}).returncode == 0
    (tmp_path / "metrics.jsonl").unlink()
    assert train(**given).returncode == 0
    assert results(tmp_path)["first_loss"] is None
    assert results(tmp_path)["loss"] == losses(tmp_path)[-1]


def test_progress_that_cannot_be_removed_at_the_end_is_one_line(tmp_path: Path) -> None:
    """Not a traceback after days of training; even root cannot unlink a directory."""
    (tmp_path / "progress.json").mkdir()
    ending = Metrics.__new__(Metrics)
    ending._is_root, ending._lines, ending._board = True, collections.deque(), None
    ending._config, ending._path = TrainConfig(output_dir=tmp_path), tmp_path / "metrics.jsonl"
    ending._file = ending._path.open("a")
    ending._train_time = TrainTime(tmp_path, 1, [], resumes=False)
    with pytest.raises(DiskError, match="Is a directory"):
        ending.close(snapshot().state)


def test_each_attempt_of_a_process_has_an_event_file_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the training is rolled back within a second."""
    monkeypatch.setattr("trainer.metrics.trackers.tensorboard.time", SimpleNamespace(time=lambda: 1.8e9))
    for first in (1, 41):
        file = EventFile(tmp_path, first)
        file.add(first, {"loss": 1.0}, at=1.8e9)
        file.close()
    steps = [event.step for path in tmp_path.iterdir() for event in EventFileLoader(str(path)).Load()]
    assert {1, 41} <= set(steps)
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 2
