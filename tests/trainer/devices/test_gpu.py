"""Training on the GPU itself: against the CPU's, resumes to the byte, no waiting. tests/trainer/devices/kernels has its
kernels, which run on the GPU where there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.support import assert_resumed, assert_same_bytes, forked, losses, options, train, write_dataset

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

COMMON = {"lr": 3e-3, "warmup_steps": 5, "ckpt_interval_steps": 0, "batch_size": 4, "grad_accum_usteps": 4}


def run(data: Path, model: Path, out: Path, **values: Any) -> Path:
    done = train(data_dir=data, model_config=model, output_dir=out, **{"device": "cuda", **COMMON, **values})
    assert done.returncode == 0, done.stdout
    assert_resumed(done, values)
    return out


@pytest.mark.parametrize(
    ("precision", "tolerance"), [("fp64", 1e-8), ("fp32", 1e-4), ("autocast", 0.01), ("bf16-master", 0.01)]
)
def test_the_loss_curve_is_the_cpus(data: Path, model: Path, tmp_path: Path, precision: str, tolerance: float) -> None:
    """Other kernels sum in another order: rounding, which grows over 20 steps; bf16 against the CPU's fp32."""
    given = {"disable_dropout": True, "max_steps": 20, "max_pred_len": 5}
    on_cpu = run(
        data, model, tmp_path / "cpu", device="cpu", precision="fp64" if precision == "fp64" else "fp32", **given
    )
    found = run(data, model, tmp_path / "gpu", precision=precision, **given)
    assert losses(on_cpu)[-1] < losses(on_cpu)[0] - 0.05
    np.testing.assert_allclose(losses(found), losses(on_cpu), rtol=tolerance)


@pytest.mark.parametrize(
    ("precision", "optimizer", "compiled"),
    [
        ("autocast", "AdamW", False), ("autocast", "Muon", False), ("fp32", "LAMB", False), ("bf16-sr", "Muon", False),
        ("bf16-master", "LAMB", False), ("autocast", "AdamW", True),
    ],
)  # fmt: skip
def test_a_killed_run_ends_with_the_same_bytes(
    data: Path, model: Path, tmp_path: Path, precision: str, optimizer: str, compiled: bool
) -> None:
    """With dropout; the run crosses the end of an epoch. Step 10's checkpoint waits until step 5's is written."""
    cache = {"compile": True, "compile_cache": tmp_path / "cache"} if compiled else {}
    given = {
        "precision": precision, "optimizer": optimizer, "max_steps": 14, "ckpt_interval_steps": 5, "max_pred_len": 5,
        **cache,
    }  # fmt: skip
    whole = run(data, model, tmp_path / "whole", **given)
    out = tmp_path / "killed"
    values = {"device": "cuda", **COMMON, **given}
    killed = train(data_dir=data, model_config=model, output_dir=out, env={"FAILPOINT": "micro-step:10.0.0"}, **values)
    assert killed.returncode == -9, killed.stdout
    run(data, model, out, resume_ckpt=True, **given)
    assert_same_bytes(out / "checkpoints" / "ckpt_14", whole / "checkpoints" / "ckpt_14")


def test_phase_2_starts_from_the_gpus_checkpoint_on_a_cpu(data: Path, model: Path, tmp_path: Path) -> None:
    """A checkpoint does not say which device wrote it; the first loss is the same but for rounding."""
    first = run(data, model, tmp_path / "phase1", max_steps=6, precision="fp32", max_pred_len=5)
    longer = write_dataset(tmp_path / "data2", [60], seq_len=64, max_pred_len=9)
    given = {
        "phase2": True, "resume_ckpt": True, "resume_ckpt_path": first / "checkpoints" / "ckpt_6", "phase1_end_step": 6,
        "max_steps": 2, "warmup_steps": 1, "max_pred_len": 9, "precision": "fp32", "disable_dropout": True,
    }  # fmt: skip
    found = [losses(run(longer, model, tmp_path / device, device=device, **given)) for device in ("cuda", "cpu")]
    np.testing.assert_allclose(*found, rtol=1e-5)


@pytest.mark.parametrize("optimizer", ["AdamW", "LAMB", "Muon"])
@pytest.mark.parametrize("precision", ["autocast", "fp32", "bf16-sr"])
def test_no_step_waits_for_the_gpu(data: Path, model: Path, tmp_path: Path, optimizer: str, precision: str) -> None:
    """A whole training, with real kernels and dropout."""
    words = options(
        data_dir=data, model_config=model, output_dir=tmp_path, device="cuda", precision=precision, max_steps=8,
        optimizer=optimizer, max_pred_len=5, **COMMON,
    )  # fmt: skip
    done = forked("tests.trainer.devices.no_waiting", *words)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == "watched 6 steps"


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_waiting_is_noticed() -> None:
    """The test above relies on this."""
    x = torch.ones(1, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            x.item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("precision", ["fp32", "autocast"])
def test_the_self_test_accepts_it(tmp_path: Path, precision: str) -> None:
    words = options(device="cuda", output_dir=tmp_path, precision=precision, model="mini", batch_size=16)
    done = forked("trainer", "--self-test", *words)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1].startswith("self-test passed: ")
