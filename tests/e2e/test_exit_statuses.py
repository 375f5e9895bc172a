"""A fault in one worker ends the run with one status, whichever worker has it and whichever torchrun sees end first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.support import ROOT, TORCHRUN, options, synthetic_rows, write_dataset, write_model_config
from trainer.data.batch_ramp import BatchSizes
from trainer.data.order import SampleOrder
from trainer.data.shards import write_shard

GIVEN = {
    "batch_size": 4, "grad_accum_usteps": 2, "warmup_steps": 1, "max_pred_len": 5, "device": "cpu", "max_steps": 6,
}  # fmt: skip


def torchrun(directory: Path, data: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run two workers to their end."""
    words = options(
        **GIVEN, data_dir=data, model_config=write_model_config(directory), output_dir=directory / "out"
    )  # fmt: skip
    return subprocess.run(
        [sys.executable, *TORCHRUN, *words], cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("action", "status"), [("raise", 70), ("kill", 137)])
def test_an_exception_and_a_kill(tmp_path: Path, rank: int, action: str, status: int) -> None:
    data = write_dataset(tmp_path / "data", [37, 40])
    done = torchrun(tmp_path, data, FAILPOINT=f"step:3.{rank}", FAILPOINT_ACTION=action)
    assert done.returncode == status, done.stdout + done.stderr
    # The one traceback is that of the worker at fault.
    assert done.stderr.count("Traceback") == (action == "raise"), done.stderr
    if action == "raise":
        assert f"RuntimeError: failpoint step:3.{rank}" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_bad_data_in_the_share_of_one_worker(tmp_path: Path, rank: int) -> None:
    """The order itself says which row that worker reads."""
    order = SampleOrder(np.array([80]), seed=12349, sizes=[BatchSizes(16)])
    row = int(order.step(3).row[4 * rank])  # the micro-batches go to the workers in turn
    arrays = synthetic_rows(80, seq_len=32, max_pred_len=5, seed=0)
    arrays["input_ids"][row, 1] = 250
    (tmp_path / "data").mkdir()
    write_shard(tmp_path / "data" / "x_training_0.hdf5", arrays)
    done = torchrun(tmp_path, tmp_path / "data")
    assert done.returncode == 1, done.stdout + done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    assert errors[0].startswith(f"error: worker {rank}: "), errors
    assert f"row {row} holds id 250" in errors[0]
    assert "Traceback" not in done.stderr
