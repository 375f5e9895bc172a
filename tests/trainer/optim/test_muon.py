"""Muon matches torch's on one worker, on several, and on tensor-parallel ranks; its iteration does what it should."""

from __future__ import annotations

import copy
import os

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.support import MODEL, all_end
from tests.trainer.optim.test_optim import Layout, fake_backward, layouts, small_model
from trainer.devices.cpu import CpuDevice
from trainer.models.bert import BertForPreTraining, has_weight_decay, is_hidden_matrix
from trainer.models.config import ModelConfig
from trainer.optim.muon import Muon, orthogonalised
from trainer.optim.parameters import FlatParameters
from trainer.optim.sharing import Replicas, SharedModel
from trainer.parallel.mesh import Mesh
from trainer.parallel.plan import split_axis
from trainer.parallel.shares import put_share
from trainer.parallel.tensor import TensorParallel
from trainer.precision import Precision

#: Updates that are computed in bf16 differ by its rounding, 2⁻⁸, in each of 5 iterations of two products.
BF16 = {"rtol": 0.0, "atol": 0.06}
RATES = (1e-2, 5e-3, 1e-3)


@pytest.mark.parametrize("shape", [(64, 64), (32, 128), (128, 32)])
def test_singular_values_become_nearly_one(shape: tuple[int, int]) -> None:
    """Compared with numpy's decomposition: singular vectors stay, and values are those of Muon's quintic."""
    generator = torch.Generator().manual_seed(1)
    matrix = torch.randn(shape, generator=generator, dtype=torch.float64)
    u, values, v = np.linalg.svd(matrix.numpy(), full_matrices=False)
    assert values.max() / values.min() > 1.5
    (found,) = orthogonalised(matrix[None], torch.float64)
    diagonal = u.T @ found.numpy() @ v.T
    assert np.abs(diagonal - np.diag(np.diag(diagonal))).max() < 1e-9
    # The quintic's range for values that begin above 0.01 of the norm: Jordan's post, "0.7 to 1.2".
    big = values / np.linalg.norm(values) > 0.01
    assert 0.65 < np.diag(diagonal)[big].min() <= np.diag(diagonal)[big].max() < 1.25
    wanted = values / np.linalg.norm(values)
    for _ in range(5):  # Jordan's post
        wanted = 3.4445 * wanted - 4.7750 * wanted**3 + 2.0315 * wanted**5
    np.testing.assert_allclose(np.diag(diagonal), wanted, rtol=1e-9)
    (rounded,) = orthogonalised(matrix[None], torch.bfloat16)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.double(), found, **BF16)


def test_a_zero_matrix_stays_zero() -> None:
    assert not orthogonalised(torch.zeros(2, 3, 5), torch.float32).any()


def make(model: BertForPreTraining, layout: Layout = FlatParameters, precision: str = "fp32", **places: object) -> Muon:
    parameters = layout(model, has_weight_decay, 2, Precision(precision), is_matrix=is_hidden_matrix, **places)
    optimizer = Muon(parameters, weight_decay=0.1, adamw_lr_ratio=0.7)
    optimizer.parameters = parameters
    return optimizer


@layouts
def test_updates_equal_torchs_muon_and_adamw(layout: Layout) -> None:
    ours, theirs = small_model().float(), copy.deepcopy(small_model()).float()
    optimizer = make(ours, layout)
    named = list(theirs.named_parameters())
    matrices = [p for n, p in named if is_hidden_matrix(n)]
    assert len(matrices) == 6 * MODEL["num_hidden_layers"]
    muon = torch.optim.Muon(matrices, lr=1.0, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    groups = [
        {"params": [p for n, p in named if has_weight_decay(n) is decays and not is_hidden_matrix(n)],
         "weight_decay": 0.1 * decays}
        for decays in (True, False)
    ]  # fmt: skip
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-6)
    before = {name: parameter.detach().clone() for name, parameter in named}
    for step, rate in enumerate(RATES):
        optimizer.parameters.zero_gradients()
        for reference, share in ((muon, 1.0), (adamw, 0.7)):
            reference.zero_grad()
            for group in reference.param_groups:
                group["lr"] = rate * share
        fake_backward(ours, step)
        fake_backward(theirs, step)
        optimizer.prepare()
        optimizer.step(rate)
        muon.step()
        adamw.step()
    for name, parameter in named:
        mine = dict(ours.named_parameters())[name]
        if is_hidden_matrix(name):
            # In units of the update of one weight: lr · 0.2 · √max(rows, columns), summed over the steps.
            unit = sum(RATES) * 0.2 * max(parameter.shape) ** 0.5
            torch.testing.assert_close((mine - before[name]) / unit, (parameter - before[name]) / unit, **BF16)
            mine, theirs_buffer = optimizer.state()[f"momentum_buffer.{name}"], muon.state[parameter]["momentum_buffer"]
            torch.testing.assert_close(mine, theirs_buffer, rtol=1e-6, atol=1e-8)
        else:
            torch.testing.assert_close(mine, parameter, rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(
                optimizer.state()[f"exp_avg_sq.{name}"], adamw.state[parameter]["exp_avg_sq"], rtol=1e-5, atol=1e-12
            )


def test_fp32_multiplies_in_fp32() -> None:
    """Its updates equal those of fp64 except for the rounding of 5 iterations, 2⁻²⁴ each, magnified about 3.4 times in
    each; bf16 products would differ by some 0.01, and take 20 to 100 times as long on hardware without bf16."""
    updates = {}
    for precision in ("fp32", "fp64"):
        model = small_model().to(Precision(precision).dtype)
        weight = model.bert.encoder.layer[0].intermediate.dense.weight
        before = weight.detach().double().clone()
        optimizer = make(model, precision=precision)
        optimizer.parameters.zero_gradients()
        generator = torch.Generator().manual_seed(3)
        for parameter in model.parameters():
            (parameter * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)).sum().backward()
        optimizer.prepare()
        optimizer.step(1.0)
        updates[precision] = weight.detach().double() - before
    torch.testing.assert_close(updates["fp32"], updates["fp64"], rtol=0, atol=1e-4)


def test_weight_decay_is_decoupled() -> None:
    """Without gradients a matrix shrinks by the rate times the decay, and nothing else changes it."""
    model = small_model()
    weight = model.bert.encoder.layer[0].intermediate.dense.weight
    before = weight.detach().clone()
    optimizer = make(model, precision="fp64")
    optimizer.prepare()
    optimizer.step(0.5)
    torch.testing.assert_close(weight.detach(), before * (1 - 0.5 * 0.1), rtol=1e-12, atol=0)


@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16-master", "bf16-sr"])
def test_it_learns_in_every_precision(precision: str) -> None:
    """The weights of a matrix approach a target under the gradient of the squared distance."""
    model = small_model().to(Precision(precision).dtype)
    parameters = FlatParameters(
        model, has_weight_decay, 2, Precision(precision, CpuDevice().round_stochastically), is_matrix=is_hidden_matrix
    )
    optimizer = Muon(parameters, weight_decay=0.0, adamw_lr_ratio=0.3)
    weight = model.bert.encoder.layer[0].intermediate.dense.weight
    generator = torch.Generator().manual_seed(2)
    target = weight.detach().double() + 0.05 * torch.randn(weight.shape, dtype=torch.float64, generator=generator)
    distances = []
    for step in range(50):
        distances.append((weight.detach().double() - target).norm().item())
        parameters.zero_gradients()
        for parameter in model.parameters():
            goal = target.to(weight.dtype) if parameter is weight else parameter.detach()
            (parameter - goal).square().sum().backward()
        optimizer.prepare()
        optimizer.step(2e-2 * (1 - step / 50))
    assert distances[-1] < distances[0] / 4


def _work(rank: int, port: int, tensor_parallel: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    mesh = Mesh(rank=rank, local_rank=rank, world_size=2, local_world_size=2, tensor_parallel_size=tensor_parallel)
    mesh, device = mesh.connect("gloo", 300), CpuDevice()

    def reduce_over_ranks(tensors: list[Tensor], sums: bool) -> None:
        device.all_reduce(tensors, mesh.tensor_parallel_group, sums=sums)

    config = ModelConfig(**MODEL)
    ranks = TensorParallel(mesh.tensor_parallel_rank, tensor_parallel, reduce_over_ranks, device.random_region)
    shared = None
    if tensor_parallel > 1:
        shared = SharedModel(ranks.rank, ranks.size, split_axis, ranks.reduce_in_place, ranks.region)
    group = mesh.data_parallel_group
    replicas = Replicas(mesh.data_parallel_rank, group.size, lambda tensors: device.all_reduce(tensors, group))
    alone = small_model()
    mine = BertForPreTraining(config, ranks=ranks).double()
    mine.initialise(seed=1)
    one, two = make(alone, precision="fp64"), make(mine, precision="fp64", shared=shared, replicas=replicas)
    for step, rate in enumerate(RATES):
        one.parameters.zero_gradients()
        two.parameters.zero_gradients()
        fake_backward(alone, step)
        whole = {name: parameter.grad for name, parameter in alone.named_parameters()}
        for name, parameter in mine.named_parameters():
            put_share(parameter.grad, name, whole[name], ranks)
        one.prepare()
        two.prepare()
        one.step(rate)
        two.step(rate)
    for name, parameter in mine.named_parameters():
        expected = torch.empty_like(parameter)
        put_share(expected, name, dict(alone.named_parameters())[name].detach(), ranks)
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-9, atol=1e-12, msg=f"{rank}: {name}")
    mesh.disconnect()


@pytest.mark.parametrize("tensor_parallel", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_two_workers_update_as_one_does(tensor_parallel: int) -> None:
    """Sharing the matrices between two copies of a model, and one model between two ranks."""
    all_end(_work, 2, tensor_parallel)
