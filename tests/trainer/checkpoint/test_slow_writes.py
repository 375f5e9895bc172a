"""Writing a checkpoint may take any time: the timeout of workers that wait for each other does not apply to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.support import train
from trainer.checkpoint.directory import why_invalid

#: Seconds that workers wait for each other (enough for a loaded machine), and that a write takes.
TIMEOUT_S, WRITE_S = 10, 25


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "steps", "slow"),
    [
        (1, 1, "model-00-of-01.safetensors"),  # the last write, at the end of the run
        (1, 2, "ckpt_1"),  # the next one has to wait for it
        (2, 1, "optimizer-01-of-02.safetensors"),  # of the other rank that shares the model
    ],
)
def test_a_write_that_takes_longer_than_a_collective_may_fails_no_run(
    data: Path, model: Path, tmp_path: Path, split: int, steps: int, slow: str
) -> None:
    point = f"rename-after:{slow}" if slow.startswith("ckpt") else f"write-after:{slow}"
    done = train(
        2, env={"FAILPOINT": point, "FAILPOINT_ACTION": f"wait {WRITE_S}"}, output_dir=tmp_path, data_dir=data,
        model_config=model, batch_size=4, grad_accum_usteps=1, warmup_steps=0, max_pred_len=5, device="cpu",
        max_steps=steps, ckpt_interval_steps=1, tensor_parallel_size=split, collective_timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert why_invalid(tmp_path / "checkpoints" / f"ckpt_{steps}") is None
    assert (tmp_path / "results.json").exists()
