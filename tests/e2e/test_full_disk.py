"""A full disk, for real: a small tmpfs. What was there stays, the line names path and space, a rerun goes on."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.chain import Chain
from tests.support import assert_one_line_error, tensors, train, write_dataset, write_model_config
from trainer.checkpoint.format import why_invalid

Disk = Callable[[int], None]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[tuple[Path, Disk]]:
    """A directory that is a file system of its own, and a function that sets its size in KiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", path], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.decode().strip()}")

    def resize(kib: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={kib}k", path], check=True)

    yield path, resize
    subprocess.run(["umount", "-l", path], check=True)


def used_kib(path: Path) -> int:
    return shutil.disk_usage(path).used // 1024


def test_training_wherever_the_disk_fills_up(disk: tuple[Path, Disk], tmp_path: Path) -> None:
    """The same run on disks from too small for the first file to just enough, 8 KiB apart: it fails at one write after
    the other. Each time the checkpoints that were durable still are, and with space the run ends as one without."""
    path, resize = disk
    data, model = write_dataset(tmp_path / "data", [40]), write_model_config(tmp_path)
    values = {
        "data_dir": data, "model_config": model, "device": "cpu", "batch_size": 4, "grad_accum_usteps": 2,
        "warmup_steps": 0, "lr": 1e-3, "max_pred_len": 5, "max_steps": 3, "ckpt_interval_steps": 1,
        "num_ckpts_to_keep": 1, "resume_ckpt": True,
    }  # fmt: skip
    done = train(output_dir=tmp_path / "straight", **values)
    assert done.returncode == 0, done.stdout
    wanted = tensors(tmp_path / "straight" / "checkpoints" / "ckpt_3")
    peak = sum(f.stat().st_size for f in (tmp_path / "straight").rglob("*") if f.is_file()) // 1024
    failures, size = 0, 16
    while True:
        resize(size)
        done = train(output_dir=path / "out", **values)
        if done.returncode == 0:
            break
        failures += 1
        assert_one_line_error(done, "cannot write", str(path), "No space left", "MB free", "run the same again")
        kept = sorted((path / "out" / "checkpoints").glob("ckpt_?")) if (path / "out").exists() else []
        assert all(why_invalid(checkpoint) is None for checkpoint in kept)
        size += 8
        assert size < 8 * peak
    assert failures >= 10
    got = tensors(path / "out" / "checkpoints" / "ckpt_3")
    assert all(got[name].tobytes() == tensor.tobytes() for name, tensor in wanted.items())


def test_a_stage_under_luigi(disk: tuple[Path, Disk], tmp_path: Path) -> None:
    path, resize = disk
    chain = Chain(tmp_path)
    words = ("ShardDataset", "--phase", "1", "--Run-work-dir", str(path / "work"))
    chain.run("TokenizeCorpus", "--Run-work-dir", str(path / "work"))
    resize(used_kib(path) + 40)
    done = chain.run(*words, status=30)
    output = done.stdout + done.stderr
    assert "Traceback" not in output, output
    assert "are free there; make space" in output
    assert str(path) in output
    resize(64 << 10)
    chain.run(*words)
