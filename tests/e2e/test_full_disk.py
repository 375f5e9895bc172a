"""A really full disk: a small tmpfs. What was there stays, the error names path and free space, a rerun resumes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.conftest import Disk
from tests.helpers.chain import Chain
from tests.helpers.support import assert_same_bytes, train, write_dataset, write_model_config
from trainer.checkpoint.directory import why_invalid


def used_kib(path: Path) -> int:
    return shutil.disk_usage(path).used // 1024


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("size", "apart_kib"), [(1, 16), (2, 40)])
def test_training_wherever_the_disk_fills_up(disk: Disk, tmp_path: Path, size: int, apart_kib: int) -> None:
    """The same run on disks whose sizes are `apart_kib` apart, from too small for the first file to just large enough:
    it fails at one write after the other, on any of the `size` ranks that share the model. Each time the checkpoints
    that were durable still are, and with enough space the run ends like one that never failed."""
    data, model = write_dataset(tmp_path / "data", [40]), write_model_config(tmp_path)
    values = {
        "data_dir": data, "model_config": model, "device": "cpu", "batch_size": 4, "grad_accum_usteps": 2,
        "warmup_steps": 0, "lr": 1e-3, "max_pred_len": 5, "max_steps": 3, "ckpt_interval_steps": 1,
        "num_ckpts_to_keep": 1, "resume_ckpt": True, "tensor_parallel_size": size,
    }  # fmt: skip
    done = train(size, output_dir=tmp_path / "straight", **values)
    assert done.returncode == 0, done.stdout
    peak = sum(f.stat().st_size for f in (tmp_path / "straight").rglob("*") if f.is_file()) // 1024
    failures, durable, kib = 0, 0, 16
    while True:
        disk.resize(kib)
        done = train(size, output_dir=disk.path / "out", **values)
        if done.returncode == 0:
            break
        failures += 1
        assert "Traceback" not in done.stdout or size > 1, done.stdout
        errors = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
        assert 1 <= len(errors) <= size, done.stdout
        for error in errors:
            assert all(words in error for words in ("cannot write", str(disk.path), "No space left", "MB free")), error
        kept = sorted((disk.path / "out" / "checkpoints").glob("ckpt_?")) if (disk.path / "out").exists() else []
        assert all(why_invalid(checkpoint) is None for checkpoint in kept)
        newest = max((int(checkpoint.name[5:]) for checkpoint in kept), default=0)
        assert newest >= durable, "a checkpoint was lost"
        durable = newest
        kib += apart_kib
        assert kib < 8 * peak
    assert failures >= 80 // apart_kib
    assert durable
    assert_same_bytes(disk.path / "out" / "checkpoints" / "ckpt_3", tmp_path / "straight" / "checkpoints" / "ckpt_3")


def test_a_stage_under_luigi(disk: Disk, tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    words = ("ShardDataset", "--phase", "1", "--Run-work-dir", str(disk.path / "work"))
    chain.run("TokenizeCorpus", "--Run-work-dir", str(disk.path / "work"))
    disk.resize(used_kib(disk.path) + 20)
    done = chain.run(*words, status=30)
    output = done.stdout + done.stderr
    assert "Traceback" not in output, output
    assert "are free there; make space" in output
    assert str(disk.path) in output
    disk.resize(64 << 10)
    chain.run(*words)
