"""What the next-sentence loss counts for. Its gradients and what is logged: tests/trainer/test_reference.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.support import assert_one_line_error, assert_same_bytes, metrics, train
from trainer.state import STATE

COMMON: dict[str, Any] = {
    "batch_size": 4, "lr": 1e-3, "warmup_steps": 1, "max_steps": 6, "max_pred_len": 5, "ckpt_interval_steps": 2,
    "device": "cpu",
}  # fmt: skip
NAMES = ("loss", "masked_lm_loss", "next_sentence_loss", "grad_norm")


@pytest.mark.slow
def test_workers_and_micro_batches_share_one_sum(data: Path, model: Path, tmp_path: Path) -> None:
    given = {
        **COMMON, "data_dir": data, "model_config": model, "precision": "fp64", "disable_dropout": True,
        "next_sentence_weight": 0.2, "ckpt_interval_steps": 0,
    }  # fmt: skip
    found = {}
    for workers, size, how in ((1, 1, "allreduce"), (2, 1, "allreduce"), (2, 1, "ddp"), (2, 2, "allreduce")):
        layout = {"tensor_parallel_size": size, "data_parallel": how, "grad_accum_usteps": 4 * size // workers}
        out = tmp_path / f"{workers}-{size}-{how}"
        done = train(workers, **given, **layout, output_dir=out)
        assert done.returncode == 0, done.stdout
        found[out.name] = np.array([[step[name] for name in NAMES] for step in metrics(out)])
    one = found.pop("1-1-allreduce")
    np.testing.assert_allclose(one[:, 0], one[:, 1] + 0.2 * one[:, 2], rtol=1e-12)
    for name, many in found.items():
        np.testing.assert_allclose(many, one, rtol=1e-8, err_msg=name)  # float64: sums in another order


def test_a_resumed_run_keeps_it(data: Path, model: Path, tmp_path: Path) -> None:
    given = {**COMMON, "data_dir": data, "model_config": model, "grad_accum_usteps": 2}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert train(**given, next_sentence_weight=0.1, output_dir=whole).returncode == 0
    run = train(**given, next_sentence_weight=0.1, output_dir=killed, env={"FAILPOINT": "step:5.0"})
    assert run.returncode == -9
    refused = train(**given, output_dir=killed, resume_ckpt=True)
    assert_one_line_error(
        refused, "next_sentence_weight = 0.1, this run has 1.0", "--allow_changes next_sentence_weight"
    )
    assert train(**given, next_sentence_weight=0.1, output_dir=killed, resume_ckpt=True).returncode == 0
    assert_same_bytes(killed / "checkpoints" / "ckpt_6", whole / "checkpoints" / "ckpt_6")
    allowed = {"resume_step": 4, "allow_changes": "next_sentence_weight"}
    done = train(**given, next_sentence_weight=1.0, output_dir=killed, **allowed)
    assert done.returncode == 0, done.stdout
    changes = json.loads((killed / "checkpoints" / "ckpt_6" / STATE).read_text())["changes"]
    assert [(one["step"], one["name"], one["old"], one["new"]) for one in changes] == [
        (4, "next_sentence_weight", 0.1, 1.0)
    ]


def test_without_that_loss_it_is_refused(data: Path, model: Path, tmp_path: Path) -> None:
    given = {**COMMON, "data_dir": data, "model_config": model, "grad_accum_usteps": 2, "output_dir": tmp_path / "out"}
    refused = train(**given, **{"no-next_sentence": True}, next_sentence_weight=0.1)
    assert_one_line_error(refused, "--next_sentence_weight 0.1", "leave out one of the two")
    refused = train(**given, next_sentence_weight=0)
    assert_one_line_error(refused, "--next_sentence_weight is 0.0", "from 0.001")
    assert not (tmp_path / "out").exists()
