"""One output directory, one trainer: a second is refused with one line, whoever started it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from common.lock import HELD_FINGERPRINT_VARIABLE, hold
from tests.helpers.chain import wait_until
from tests.helpers.support import ROOT, Workers, assert_one_line_error, metrics, options, train

GIVEN: dict[str, Any] = {
    "batch_size": 4, "grad_accum_usteps": 2, "warmup_steps": 1, "max_pred_len": 5, "device": "cpu", "max_steps": 6,
    "resume_ckpt": True,
}  # fmt: skip


@pytest.mark.parametrize("workers", [1, 2])
def test_a_second_trainer_is_refused_and_changes_nothing(data: Path, model: Path, tmp_path: Path, workers: int) -> None:
    given = {**GIVEN, "data_dir": data, "model_config": model, "output_dir": tmp_path}
    first = Workers(workers, "trainer", options(**given), {"FAILPOINT": "step:3.0", "FAILPOINT_ACTION": "stop"})
    wait_until(lambda: (tmp_path / "metrics.jsonl").exists(), timeout_s=60)
    root = first.processes[0]
    wait_until(lambda: "T" in Path(f"/proc/{root.pid}/stat").read_text().rsplit(")", 1)[1].split()[0], timeout_s=60)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    second = train(workers, **given)
    error = f"{tmp_path} is being made by process {root.pid} on "
    assert second.returncode == 1, second.stdout
    assert sum(error in line for line in second.stdout.splitlines()) == 1, second.stdout
    assert "Traceback" not in second.stdout
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    os.kill(root.pid, signal.SIGCONT)
    assert first.wait().returncode == 0
    assert [record["step"] for record in metrics(tmp_path)] == list(range(1, 7))


def test_the_lock_is_free_again_after_a_kill(data: Path, model: Path, tmp_path: Path) -> None:
    given = {**GIVEN, "data_dir": data, "model_config": model, "output_dir": tmp_path}
    assert train(env={"FAILPOINT": "step:3.0"}, **given).returncode == -signal.SIGKILL
    assert train(**given).returncode == 0


@pytest.mark.slow
def test_under_torchrun_the_second_ends_with_the_same_line_and_status(data: Path, model: Path, tmp_path: Path) -> None:
    words = options(**GIVEN, data_dir=data, model_config=model, output_dir=tmp_path)
    torchrun = ["-m", "trainer.launch.torchrun", "--standalone", "--local-addr=127.0.0.1", "--nproc_per_node=2"]
    with hold(tmp_path):
        done = subprocess.run(
            [sys.executable, *torchrun, "-m", "trainer", *words],
            cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    assert f"is being made by process {os.getpid()}" in errors[0]


def test_only_the_command_that_the_holder_has_started_goes_past_its_lock(
    data: Path, model: Path, tmp_path: Path
) -> None:
    """The fingerprint in the directory is the proof: the variable alone, inherited by chance, is not enough."""
    given = {**GIVEN, "data_dir": data, "model_config": model, "output_dir": tmp_path, "max_steps": 1}
    with hold(tmp_path):
        assert_one_line_error(train(env={HELD_FINGERPRINT_VARIABLE: "f"}, **given), "is being made by process")
        (tmp_path / "stage.json").write_text(json.dumps({"fingerprint": "f"}))
        done = train(env={HELD_FINGERPRINT_VARIABLE: "f"}, **given)
    assert done.returncode == 0, done.stdout
