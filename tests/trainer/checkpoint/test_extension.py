"""A stable checkpoint fits every run that is the same up to it: a longer one ends with the same bytes as without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.helpers.support import assert_one_line_error, assert_same_bytes, metrics, train
from trainer import registry
from trainer.checkpoint.stable import stable_step
from trainer.optim.parameters import FlatParameters
from trainer.optim.schedule import learning_rate
from trainer.optim.select import make_optimizer
from trainer.precision import Precision
from trainer.registry import stable_steps

GIVEN: dict[str, Any] = {
    "batch_size": 4, "grad_accum_usteps": 4, "warmup_steps": 2, "max_pred_len": 5, "device": "cpu", "lr": 3e-3,
    "ckpt_interval_steps": 0, "precision": "fp32", "decay_share": 0.5, "num_ckpts_to_keep": 1,
}  # fmt: skip


def run(data: Path, model: Path, out: Path, **values: Any) -> str:
    done = train(data_dir=data, model_config=model, output_dir=out, **{**GIVEN, **values})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def names(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())


@pytest.mark.parametrize("schedule", ["constant", "wsd"])
@pytest.mark.parametrize(("short", "long"), [(10, 14), (7, 100), (5, 9)])
def test_the_stable_part_is_the_same_function_in_longer_runs(schedule: str, short: int, long: int) -> None:
    def rates(steps: int) -> list[float]:
        known = {"peak": 0.5, "warmup_steps": 3, "decay_share": 0.3}
        return [learning_rate(schedule, step, max_steps=steps, **known) for step in range(steps)]

    stable = stable_steps(schedule, max_steps=short, decay_share=0.3)
    assert rates(short)[:stable] == rates(long)[:stable]
    if schedule == "wsd":  # the update after the next differs: the stable part is as long as it can be
        assert rates(short)[stable + 1] != rates(long)[stable + 1]
    assert stable_steps("linear", max_steps=short, decay_share=0.3) == 0


@pytest.mark.parametrize(
    ("before", "after", "step"),
    [
        # Extended from the end of the stable part, whose checkpoint num_ckpts_to_keep = 1 has spared.
        ({"schedule": "wsd", "max_steps": 8}, {"schedule": "wsd", "max_steps": 12}, 4),
        # Finished with a short decay.
        ({"schedule": "constant", "max_steps": 6}, {"schedule": "wsd", "max_steps": 9, "decay_share": 0.3}, 6),
        ({"schedule": "constant", "max_steps": 6}, {"schedule": "constant", "max_steps": 9}, 6),
    ],
)
def test_a_run_that_goes_on_from_a_stable_checkpoint_ends_with_the_bytes_of_one_from_scratch(
    data: Path, model: Path, tmp_path: Path, before: dict[str, Any], after: dict[str, Any], step: int
) -> None:
    """In the same directory and in another, with dropout, state.json included."""
    scratch, first, second = tmp_path / "scratch", tmp_path / "first", tmp_path / "second"
    run(data, model, scratch, **after)
    run(data, model, first, **before)
    stable = first / "checkpoints" / f"ckpt_{step}"
    assert stable.is_dir()
    last = f"checkpoints/ckpt_{after['max_steps']}"
    for out, given in (
        (second, {"resume_ckpt_path": stable}),
        (first, {"resume_step": step} if before["schedule"] == "wsd" else {"resume_ckpt": True}),
    ):
        said = run(data, model, out, **after, **given)
        assert f"max_steps {before['max_steps']} → {after['max_steps']}: the same up to step {step}" in said
        assert_same_bytes(out / last, scratch / last)
    assert [record["step"] for record in metrics(first)] == list(range(1, after["max_steps"] + 1))
    assert (first / last / "state.json").read_bytes() == (scratch / last / "state.json").read_bytes()


def test_phase_2_keeps_what_a_longer_phase_1_continues_from(data: Path, model: Path, tmp_path: Path) -> None:
    """In the same directory, where the newest checkpoint alone is kept besides."""
    run(data, model, tmp_path, schedule="wsd", max_steps=8)
    given = {"phase2": True, "phase1_end_step": 8, "resume_ckpt": True, "max_steps": 6, "ckpt_interval_steps": 2}
    run(data, model, tmp_path, **given)
    assert names(tmp_path) == ["ckpt_14", "ckpt_4"]
    scratch = tmp_path / "scratch"
    run(data, model, scratch, schedule="wsd", max_steps=12)
    longer = tmp_path / "longer"
    stable = {"resume_ckpt_path": tmp_path / "checkpoints" / "ckpt_4"}
    run(data, model, longer, schedule="wsd", max_steps=12, **stable)
    assert_same_bytes(longer / "checkpoints" / "ckpt_12", scratch / "checkpoints" / "ckpt_12")


def test_a_checkpoint_without_a_state_of_the_optimizer_can_be_continued_if_there_is_none(
    data: Path, model: Path, tmp_path: Path
) -> None:
    parameters = FlatParameters(nn.Linear(2, 2), lambda name: True, 0, Precision("fp32"))
    made = {name: make_optimizer(name, parameters, weight_decay=0.0, number=None) for name in registry.OPTIMIZERS}
    assert {name for name, one in made.items() if not one.state()} == registry.STATELESS_OPTIMIZERS
    for optimizer, minimal, step in (("SGD", False, 2), ("AdamW", False, 2), ("AdamW", True, None)):
        out = tmp_path / f"{optimizer}-{minimal}"
        run(data, model, out, schedule="constant", max_steps=2, optimizer=optimizer, minimal_ckpt=minimal)
        assert stable_step(out / "checkpoints" / "ckpt_2") == step


def test_a_checkpoint_of_the_decay_is_refused_with_the_step_to_go_on_from(
    data: Path, model: Path, tmp_path: Path
) -> None:
    run(data, model, tmp_path, schedule="wsd", max_steps=8)
    assert names(tmp_path) == ["ckpt_4", "ckpt_8"]
    given = {**GIVEN, "data_dir": data, "model_config": model, "output_dir": tmp_path, "resume_ckpt": True}
    refused = train(**given, schedule="wsd", max_steps=12)
    assert_one_line_error(refused, "ckpt_8", "max_steps = 8, this run has 12", "up to step 4", "--resume_step")
    # A run whose decay would have begun before the checkpoint is a different training, too.
    refused = train(**given, schedule="wsd", max_steps=6, resume_step=4)
    assert_one_line_error(refused, "ckpt_4", "max_steps = 8, this run has 6", "up to step 3")
    refused = train(**given, schedule="linear", max_steps=8, resume_step=4)
    assert_one_line_error(refused, "schedule = wsd, this run has linear")
    assert names(tmp_path) == ["ckpt_4", "ckpt_8"]
