"""torch's DistributedDataParallel compared with our all-reduce: the same curve, and exact resume where possible."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.helpers.images import write_images
from tests.helpers.support import (
    assert_one_line_error,
    assert_resumed,
    losses,
    tensors,
    train,
    write_dataset,
    write_model_config,
)

BERT = {"batch_size": 4, "lr": 3e-3, "warmup_steps": 2, "max_pred_len": 5, "max_steps": 12}


@pytest.fixture(scope="module")
def workloads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    """Options of a small run of each workload."""
    directory = tmp_path_factory.mktemp("workloads")
    data, model = write_dataset(directory / "data", [37, 40, 23, 31]), write_model_config(directory)
    images = write_images(directory / "images", training=200)
    return {
        "bert": {"data_dir": data, "model_config": model, "disable_dropout": True, **BERT},
        "mnist": {"workload": "mnist", "data_dir": images, "batch_size": 8, "epochs": 2},
    }


def run(out: Path, workers: int, **values: object) -> Path:
    done = train(workers, output_dir=out, **{"device": "cpu", "ckpt_interval_steps": 0, **values})
    assert done.returncode == 0, done.stdout
    assert_resumed(done, values)
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workload", "micro_steps", "optimizer"),
    [("bert", 1, "AdamW"), ("bert", 3, "AdamW"), ("bert", 2, "Muon"), ("mnist", 1, "SGD"), ("mnist", 2, "SGD")],
)
def test_the_curve_is_that_of_the_all_reduce(
    workloads: dict[str, dict[str, object]], tmp_path: Path, workload: str, micro_steps: int, optimizer: str
) -> None:
    """In float64: the sums are the same, in another order. Gradients are DDP's from the first step on, and only the
    last of several micro-steps is reduced."""
    values = {**workloads[workload], "precision": "fp64", "grad_accum_usteps": micro_steps, "optimizer": optimizer}
    curves = {how: losses(run(tmp_path / how, 2, data_parallel=how, **values)) for how in ("allreduce", "ddp")}
    assert len(curves["ddp"]) >= 12
    assert len(set(curves["ddp"])) == len(curves["ddp"])
    np.testing.assert_allclose(curves["ddp"], curves["allreduce"], rtol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_with_one_or_two_workers_a_resumed_run_ends_with_the_same_bytes(
    workloads: dict[str, dict[str, object]], tmp_path: Path, workers: int
) -> None:
    """Two numbers have the same sum in any order. With dropout."""
    values = {**workloads["bert"], "disable_dropout": False, "data_parallel": "ddp", "grad_accum_usteps": 2}
    straight = run(tmp_path / "straight", workers, **values)
    cut = run(tmp_path / "cut", workers, steps_this_run=5, **values)
    run(cut, workers, resume_ckpt=True, **values)
    wanted, got = (tensors(out / "checkpoints" / "ckpt_12") for out in (straight, cut))
    assert wanted.keys() == got.keys()
    for name, tensor in wanted.items():
        assert got[name].tobytes() == tensor.tobytes(), name


@pytest.mark.usefixtures("torch_xla")
def test_xla_on_the_cpu_is_refused(workloads: dict[str, dict[str, object]], tmp_path: Path) -> None:
    done = train(output_dir=tmp_path / "out", device="xla", data_parallel="ddp", **workloads["mnist"])
    assert_one_line_error(done, "--data_parallel ddp does not go with --device xla", "use allreduce")


def test_other_names_are_refused(workloads: dict[str, dict[str, object]], tmp_path: Path) -> None:
    done = train(output_dir=tmp_path / "out", data_parallel="zero", **workloads["mnist"])
    assert_one_line_error(done, "--data_parallel is zero", "allreduce, ddp")
