"""`--spawn N`: workers without torchrun on the command line, as the DDP tutorial's ddp_xmp_spawn.py starts them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.chain import one_core, wait_until
from tests.helpers.support import (
    ROOT,
    assert_one_line_error,
    assert_same_bytes,
    command,
    metrics,
    options,
    require_torch_xla,
)

GIVEN = {"batch_size": 4, "grad_accum_usteps": 1, "max_steps": 4, "warmup_steps": 1, "max_pred_len": 5, "lr": 3e-3}


@pytest.mark.slow
@pytest.mark.parametrize(("device", "data_parallel"), [("cpu", "ddp"), ("xla", "allreduce")])
def test_spawned_workers_are_torchruns(
    data: Path, model: Path, tmp_path: Path, device: str, data_parallel: str
) -> None:
    """The same bytes as under torchrun itself."""
    if device == "xla":
        require_torch_xla()
    given = {"data_dir": data, "model_config": model, "device": device, "data_parallel": data_parallel, **GIVEN}
    spawned, under_torchrun = tmp_path / "spawned", tmp_path / "torchrun"
    with one_core():
        done = command("-m", "trainer", *options(**given, output_dir=spawned, spawn=2))
        assert done.returncode == 0, done.stdout + done.stderr
        assert "2 worker(s)" in done.stdout
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "trainer")
        done = command(*launcher, *options(**given, output_dir=under_torchrun))
        assert done.returncode == 0, done.stdout + done.stderr
    assert_same_bytes(spawned / "checkpoints" / "ckpt_4", under_torchrun / "checkpoints" / "ckpt_4")


@pytest.mark.slow
def test_a_signal_reaches_the_spawned_workers(data: Path, model: Path, tmp_path: Path) -> None:
    """They save and stop with the status that says so; no process of theirs is left."""
    given = {"data_dir": data, "model_config": model, "device": "cpu", **GIVEN, "max_steps": 100_000}
    words = options(**given, output_dir=tmp_path / "out", spawn=2)
    trainer = subprocess.Popen(
        [sys.executable, "-m", "trainer", *words], cwd=ROOT, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        wait_until(lambda: (tmp_path / "out" / "metrics.jsonl").exists() and len(metrics(tmp_path / "out")) > 2)
        trainer.send_signal(signal.SIGTERM)
        said, _ = trainer.communicate(timeout=120)
    finally:
        if trainer.poll() is None:
            os.killpg(trainer.pid, signal.SIGKILL)
    assert trainer.returncode == 75, said
    assert "the state is saved" in said
    with pytest.raises(ProcessLookupError):
        os.killpg(trainer.pid, 0)


def test_what_cannot_be_spawned_is_one_line() -> None:
    assert_one_line_error(command("-m", "trainer", "--spawn=-1"), "--spawn -1 is not a number", "1 or more")
    refused = command("-m", "trainer", "--spawn", "2", env={"TORCHELASTIC_RUN_ID": "here", "RANK": "0"})
    assert_one_line_error(refused, "--spawn 2 under torchrun", "leave one of them out")
