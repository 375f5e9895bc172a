"""`--grad_reduce_in_bf16`: what is sent and added, and what it does to training."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.helpers.support import (
    all_end,
    assert_one_line_error,
    assert_resumed,
    losses,
    tensors,
    train,
    write_dataset,
    write_model_config,
)
from trainer.devices.cpu import CpuDevice
from trainer.optim.parameters import FlatParameters, Parameters, SeparateParameters
from trainer.parallel.mesh import Mesh
from trainer.precision import Precision

#: Losses are summed in fp32: bf16 cannot represent this number.
LOSS = 1 + 2**-20


def to_bf16(x: np.ndarray) -> np.ndarray:
    """fp32 rounded to the nearest number whose lower 16 bits are zero, ties to even."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32)


def _gradients(rank: int) -> np.ndarray:
    """Of magnitudes from 1e-6 to 1e6, none of them a bf16 number."""
    generator = np.random.default_rng(rank)
    return (generator.normal(size=(40, 50)) * 10.0 ** generator.integers(-6, 7, (40, 50))).astype(np.float32)


def _reduce(rank: int, port: int, layout: type[Parameters]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    mesh = Mesh(rank=rank, local_rank=rank, world_size=2, local_world_size=2).connect("gloo", 60)
    model, device = nn.Linear(50, 40, bias=False), CpuDevice()
    parameters = layout(model, lambda name: True, 1, Precision("fp32"))
    parameters.zero_gradients()
    assert model.weight.grad is not None
    model.weight.grad.copy_(torch.from_numpy(_gradients(rank)))
    parameters.add_extras(torch.tensor([LOSS]))
    loss = parameters.reduce(lambda sums: device.all_reduce(sums, mesh.data_parallel_group), in_bf16=True)
    assert loss.tolist() == [2 * LOSS]
    ((_, total),) = parameters.named([group.gradients for group in parameters.groups])
    expected = to_bf16(to_bf16(_gradients(0)) + to_bf16(_gradients(1)))
    np.testing.assert_array_equal(total.numpy(), expected)
    assert model.weight.grad is not None
    np.testing.assert_array_equal(model.weight.grad.numpy(), expected)
    mesh.disconnect()


@pytest.mark.parametrize("layout", [FlatParameters, SeparateParameters])
def test_gradients_are_rounded_added_and_rounded_as_numpy_does(layout: type[Parameters]) -> None:
    all_end(_reduce, 2, layout)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("work")
    return {
        "data_dir": write_dataset(folder / "data", [40, 40]), "model_config": write_model_config(folder),
        "batch_size": 4, "lr": 3e-3, "warmup_steps": 5, "max_pred_len": 5, "max_steps": 40, "precision": "fp32",
        "disable_dropout": True, "device": "cpu", "ckpt_interval_steps": 0,
    }  # fmt: skip


def run(out: Path, workers: int, **values: object) -> Path:
    done = train(workers, output_dir=out, grad_accum_usteps=4 // workers, **values)
    assert done.returncode == 0, done.stdout
    assert_resumed(done, values)
    return out


def test_the_loss_curve_is_that_of_fp32_sums(work: dict[str, object], tmp_path: Path) -> None:
    """Each gradient is off by up to 2⁻⁸, in either direction; losses, where this was written, by up to 1.6e-5."""
    exact = losses(run(tmp_path / "fp32", 2, **work))
    assert exact[-1] < 0.9 * exact[0]
    for workers in (2, 4):
        rounded = losses(run(tmp_path / str(workers), workers, grad_reduce_in_bf16=True, **work))
        assert rounded != exact
        np.testing.assert_allclose(rounded, exact, rtol=1e-4)


def test_a_worker_alone_sends_nothing(work: dict[str, object], tmp_path: Path) -> None:
    given = {**work, "max_steps": 6}
    outs = [run(tmp_path / str(on), 1, grad_reduce_in_bf16=on, **given) for on in (True, False)]
    one, other = (tensors(out / "checkpoints" / "ckpt_6") for out in outs)
    for name, tensor in other.items():
        np.testing.assert_array_equal(one[name], tensor, err_msg=name)


def test_a_resume_must_keep_it(work: dict[str, object], tmp_path: Path) -> None:
    given = {**work, "max_steps": 6}
    out = run(tmp_path / "out", 2, grad_reduce_in_bf16=True, steps_this_run=3, **given)
    straight = run(tmp_path / "straight", 2, grad_reduce_in_bf16=True, **given)
    refused = train(output_dir=out, resume_ckpt=True, grad_accum_usteps=4, **given)
    assert_one_line_error(refused, "was trained with grad_reduce_in_bf16 = True, this run has False")
    run(out, 2, grad_reduce_in_bf16=True, resume_ckpt=True, **given)
    one, other = (tensors(path / "checkpoints" / "ckpt_6") for path in (out, straight))
    for name, tensor in other.items():
        np.testing.assert_array_equal(one[name], tensor, err_msg=name)


def test_ddp_refuses_it(work: dict[str, object], tmp_path: Path) -> None:
    done = train(output_dir=tmp_path, data_parallel="ddp", grad_reduce_in_bf16=True, **work)
    assert_one_line_error(done, "ddp does not go with --grad_reduce_in_bf16; use allreduce, or leave the rest")


@pytest.mark.slow
@pytest.mark.usefixtures("torch_xla")
def test_xla_sends_them_too(work: dict[str, object], tmp_path: Path) -> None:
    """Through gloo on the host, from separate tensors: the CPU's curve except for the order of sums."""
    given = {**work, "max_steps": 12, "grad_reduce_in_bf16": True}
    cpu, xla = (losses(run(tmp_path / device, 2, **{**given, "device": device})) for device in ("cpu", "xla"))
    np.testing.assert_allclose(xla, cpu, rtol=1e-3)
