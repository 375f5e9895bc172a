"""The complete checkpoints of its branch tell how far a training has got."""

from __future__ import annotations

import shutil
from pathlib import Path

from pipeline.launchers.restarts import checkpoint_steps, newest_checkpoint
from pipeline.status.stage_dirs import last_checkpoint_step
from tests.helpers.checkpoints import save, snapshot
from trainer.checkpoint.directory import set_aside


def test_only_whole_checkpoints_of_the_branch_count_as_progress(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    for step in (10, 20, 30, 40):
        save(directory, snapshot(step))
    set_aside(directory, [directory / "ckpt_40"], tmp_path / "metrics.jsonl")
    (directory / "ckpt_30" / "manifest.json").unlink()  # never finished
    shutil.copytree(directory / "ckpt_20", directory / "ckpt_25")
    (directory / "ckpt_25" / "optimizer-00-of-01.safetensors").write_bytes(b"cut")
    assert checkpoint_steps(tmp_path) == {10, 20}
    assert newest_checkpoint(tmp_path) == 20
    assert last_checkpoint_step(tmp_path) == 20
    assert newest_checkpoint(tmp_path / "nowhere") == 0
