"""The XLA device, for real, on the CPU: the same results as torch's CPU, two graphs, exact resume."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from common.errors import UserError
from tests.helpers.support import (
    assert_one_line_error,
    assert_resumed,
    assert_same_bytes,
    losses,
    metrics,
    tensors,
    train,
    write_model_config,
)
from trainer.devices.xla import XlaDevice
from trainer.metrics.budget import fixed_steps
from trainer.parallel.mesh import Mesh

pytestmark = pytest.mark.usefixtures("torch_xla")

#: What torch_xla adds to a user's flags when it is imported.
A_USERS_FLAGS = "--xla_cpu_enable_fast_math=false"

COMMON = {"batch_size": 4, "lr": 3e-3, "warmup_steps": 5, "max_pred_len": 5, "ckpt_interval_steps": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer: graphs of two take twice as long to compile."""
    return write_model_config(tmp_path_factory.mktemp("model"), num_hidden_layers=1)


def run(data: Path, model: Path, out: Path, *, workers: int = 1, flags: str | None = None, **values: object) -> Path:
    """16 sequences a step in 4 micro-batches, whatever the number of workers. `flags`: XLA's, the tests' if None."""
    given = {"device": "xla", "grad_accum_usteps": 4 // workers, **COMMON, **values}
    env = {} if flags is None else {"XLA_FLAGS": flags}
    done = train(workers, data_dir=data, model_config=model, output_dir=out, env=env, **given)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_resumed(done, values)
    return out


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-8), ("fp32", 1e-4)])
def test_the_loss_curve_is_the_cpus(data: Path, model: Path, tmp_path: Path, precision: str, tolerance: float) -> None:
    """Other kernels sum in another order: rounding, which grows over 20 steps. Two workers reduce through gloo. One
    worker compiles as a user's does, with optimization, in the precision that users have."""
    given = {"precision": precision, "disable_dropout": True, "max_steps": 20}
    if precision == "fp64":  # the last layer is not like the others
        model = write_model_config(tmp_path)
    expected = losses(run(data, model, tmp_path / "cpu", device="cpu", **given))
    assert expected[-1] < expected[0]
    optimized = A_USERS_FLAGS if precision == "fp32" else None
    for workers, execution, flags in ((1, 2, optimized), (2, 1, None)):
        out = tmp_path / str(workers)
        run(data, model, out, workers=workers, batches_per_execution=execution, flags=flags, **given)
        np.testing.assert_allclose(losses(out), expected, rtol=tolerance)


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_bytes_and_compiles_nothing_late(
    data: Path, model: Path, tmp_path: Path
) -> None:
    """An epoch has 8 steps: the run crosses its end, log lines, checkpoints and a changing learning rate. Its softmax
    is sampled, anew in each micro-step. Step 10's checkpoint waits until step 5's is written."""
    given = {"precision": "fp32", "max_steps": 14, "ckpt_interval_steps": 5, "log_interval": 3, "sampled_softmax": 40}
    whole = run(data, model, tmp_path / "whole", **given)
    out = tmp_path / "killed"
    killed = train(
        data_dir=data, model_config=model, output_dir=out, device="xla", grad_accum_usteps=4, **COMMON | given,
        env={"FAILPOINT": "micro-step:10.0.0"},
    )  # fmt: skip
    assert killed.returncode == -9, killed.stdout
    resumed = run(data, model, out, resume_ckpt=True, **given)

    ours, theirs = (tensors(directory / "checkpoints" / "ckpt_14") for directory in (resumed, whole))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name], tensor, err_msg=name)
    # The counter is torch_xla's own. A step is recorded before its last graph is run, hence only from the third on.
    for directory, steps in ((whole, range(3, 15)), (resumed, range(13, 15))):
        compiled = {record["step"]: record["compiled_graphs"] for record in metrics(directory)}
        assert {compiled[step] for step in steps} == {2}, compiled


@pytest.mark.slow
def test_measuring_the_steps_of_a_budget_compiles_the_graphs_of_the_training(
    data: Path, model: Path, tmp_path: Path
) -> None:
    given = {"precision": "fp32", "ckpt_interval_steps": 3, "steps_this_run": 5}
    measured = run(data, model, tmp_path / "measured", budget="10m", **given)
    steps = fixed_steps(measured, 1)
    assert steps is not None
    whole = run(data, model, tmp_path / "given", max_steps=steps, **given)
    assert_same_bytes(measured / "checkpoints" / "ckpt_5", whole / "checkpoints" / "ckpt_5")
    assert {record["compiled_graphs"] for record in metrics(measured)} == {2}
    assert [record["compiled_graphs"] for record in metrics(whole)][2:] == [2, 2, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "optimizer"), [("bf16-sr", "LAMB"), ("bf16-master", "AdamW"), ("bf16-sr", "Muon")]
)
def test_bf16_weights_cost_no_graph_and_resume_exactly(
    data: Path, model: Path, tmp_path: Path, precision: str, optimizer: str
) -> None:
    """Stochastic rounding is part of the update's graph; its seed is an input."""
    given = {"precision": precision, "optimizer": optimizer, "max_steps": 5, "disable_dropout": True}
    whole = run(data, model, tmp_path / "whole", **given)
    cut = run(data, model, tmp_path / "cut", steps_this_run=3, **given)
    run(data, model, cut, resume_ckpt=True, **given)
    assert_same_bytes(cut / "checkpoints" / "ckpt_5", whole / "checkpoints" / "ckpt_5")
    assert [record["compiled_graphs"] for record in metrics(whole)][2:] == [2, 2, 2]
    cpu = run(data, model, tmp_path / "cpu", **given | {"device": "cpu"})
    # bf16 activations by other kernels, and other draws: an update ten times as large would be off by more.
    np.testing.assert_allclose(losses(whole), losses(cpu), rtol=2e-3)


def test_steps_of_unlike_graphs_are_refused(data: Path, model: Path, tmp_path: Path) -> None:
    done = train(
        data_dir=data, model_config=model, output_dir=tmp_path, device="xla", grad_accum_usteps=4,
        batches_per_execution=3,
    )  # fmt: skip
    assert_one_line_error(done, "grad_accum_usteps / batches_per_execution = 4 / 3", "change one of them")


def test_xla_and_torchrun_must_see_the_same_workers() -> None:
    """On the CPU, XLA knows of one worker per process, whatever torchrun started: they communicate through gloo."""
    XlaDevice.check_worlds(Mesh(world_size=4), 1)
    with pytest.raises(UserError, match=r"one XLA device per process, but sees 2 .*torchrun"):
        XlaDevice.check_worlds(Mesh(world_size=2), 2)
