"""What is random in training is independent wherever it should be, and the same wherever it must be."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.chance import assert_mean_zero, assert_uncorrelated
from tests.helpers.support import Workers, options, write_model_config
from trainer.data.batch_ramp import BatchSizes
from trainer.data.order import SampleOrder
from trainer.devices.base import Device, DeviceOptions
from trainer.devices.cpu_kernels import library
from trainer.devices.select import select
from trainer.machine.subject import linear
from trainer.parallel.mesh import Mesh
from trainer.parallel.plan import split_of
from trainer.seeds import derive_seed

STEPS, USTEPS = 3, 2
#: Dropout calls in one micro-step of two layers: the embeddings', and per layer attention's and two more.
CALLS, ATTENTION = 7, (1, 4)
#: Elements of one draw.
ELEMENTS = 4096
#: What 0.1 is as a multiple of 2⁻¹⁶.
P = round(0.1 * 2**16) / 2**16

Draws = dict[str, np.ndarray]


def record(data: Path, out: Path, workers: int, **values: object) -> list[Draws]:
    """What each worker of a run drew, as `tests.helpers.recorder` records it: the streams. How a kernel uses one is
    tested in tests/trainer/devices/cpu_kernels."""
    model = write_model_config(out.parent)
    given = {
        "data_dir": data, "model_config": model, "output_dir": out, "batch_size": 4, "grad_accum_usteps": USTEPS,
        "max_steps": STEPS, "warmup_steps": 1, "max_pred_len": 5, "device": "cpu", "ckpt_interval_steps": 0,
    }  # fmt: skip
    done = Workers(workers, "tests.helpers.recorder", options(**{**given, **values}), {}).wait()
    assert done.returncode == 0, done.stdout
    return [dict(np.load(out / f"random-{rank}.npz")) for rank in range(workers)]


needs_kernels = pytest.mark.skipif(library() is None, reason="needs a C compiler")


def masks(drawn: Draws, rank: int) -> dict[str, np.ndarray]:
    found = {}
    for call in range(STEPS * USTEPS * CALLS):
        ustep, place = divmod(call, CALLS)
        name = f"rank {rank}, step {ustep // USTEPS}, micro-step {ustep % USTEPS}, dropout {place}"
        found[name] = drawn[f"keep/{call}"]
    assert f"keep/{STEPS * USTEPS * CALLS}" not in drawn
    return found


def assert_independent_masks(found: dict[str, np.ndarray], p: float = P) -> None:
    dropped, variances = (np.zeros((len(found), ELEMENTS)) for _ in range(2))
    for row, mask in enumerate(found.values()):
        dropped[row, : len(mask)] = ~mask - p
        variances[row, : len(mask)] = p * (1 - p)
    assert_mean_zero(dropped, variances, names=list(found))
    assert_uncorrelated(dropped, variances, names=list(found))


@needs_kernels
@pytest.mark.parametrize("workers", [1, 2])
def test_no_dropout_of_a_run_tells_of_another(data: Path, tmp_path: Path, workers: int) -> None:
    """Not the dropout of another layer, micro-step, step or worker."""
    drawn = record(data, tmp_path / "out", workers)
    found = {name: mask for rank in range(workers) for name, mask in masks(drawn[rank], rank).items()}
    assert len(found) == workers * STEPS * USTEPS * CALLS
    assert_independent_masks(found)


@needs_kernels
def test_ranks_of_one_model_share_dropout_but_where_it_is_split(data: Path, tmp_path: Path) -> None:
    drawn = record(data, tmp_path / "out", 2, tensor_parallel_size=2)
    first, second = (masks(drawn[rank], rank) for rank in (0, 1))
    own = {}
    for (name, mine), (other, theirs) in zip(first.items(), second.items(), strict=True):
        if int(name[-1]) in ATTENTION:
            own[other] = theirs
        else:
            assert np.array_equal(mine, theirs), name
    assert len(own) == STEPS * USTEPS * len(ATTENTION)
    assert_independent_masks(first | own)


@needs_kernels
def test_phases_and_seeds_draw_anew(data: Path, tmp_path: Path) -> None:
    """Phase 2 begins at the global step at which phase 1 ended."""
    found = {}
    for name, values in {
        "12": {"seed": 12},
        "13": {"seed": 13},
        "12, later": {"seed": 12, "phase1_end_step": 3},
    }.items():
        out = tmp_path / name / "out"
        out.parent.mkdir()
        if "phase1_end_step" in values:
            values |= {"phase2": True, "resume_ckpt": True}
            values["resume_ckpt_path"] = tmp_path / "12" / "out" / "checkpoints" / "ckpt_3"
        found |= {f"seed {name}: {where}": mask for where, mask in masks(record(data, out, 1, **values)[0], 0).items()}
    assert_independent_masks(found)


def roundings(drawn: Draws, names: list[str], length: int) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """(name, residual, variance) of each piece of `length` weights of `names`, after each of their updates: 1 if
    rounded up in magnitude, 0 if down, minus the probability of it by definition; and that number's variance."""
    for step in range(1, STEPS):  # the first update has rate 0
        for side_by_side in names:
            before, after = (
                drawn[f"{side}/{step}/{side_by_side}"].reshape(-1).view(np.uint32) for side in ("before", "after")
            )
            part = (before & 0xFFFF) / 2**16
            up = (after >> 16).astype(np.int64) - (before >> 16)
            assert set(np.unique(up)) <= {0, 1}
            assert not (after & 0xFFFF).any()
            for at in range(0, len(before) - length + 1, length):
                here = slice(at, at + length)
                yield f"update {step}, {side_by_side}[{at}:]", (up - part)[here], (part * (1 - part))[here]


@pytest.mark.parametrize("size", [1, 2])
def test_roundings_are_unbiased_and_independent(data: Path, tmp_path: Path, size: int) -> None:
    """Over weights, tensors and updates, and over the ranks where a tensor is split; other tensors stay the same."""
    drawn = record(data, tmp_path / "out", size, tensor_parallel_size=size, precision="bf16-sr")
    names = [key.removeprefix("after/0/") for key in drawn[0] if key.startswith("after/0/")]
    found = list(roundings(drawn[0], names, 512))
    for rank in range(1, size):
        split = [name for name in names if split_of(name) is not None]
        for key in drawn[0]:
            if key.startswith("after/") and key.split("/")[2] not in split:
                assert np.array_equal(drawn[rank][key], drawn[0][key]), key
        found += [(f"rank {rank}, {name}", *rest) for name, *rest in roundings(drawn[rank], split, 512)]
    assert len(found) > 100
    labels, residuals, variances = (list(column) for column in zip(*found, strict=True))
    assert_mean_zero(residuals, variances, names=labels)
    assert_uncorrelated(residuals, variances, names=labels)


def device_called(name: str) -> Device:
    if name == "xla":
        pytest.importorskip("torch_xla")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    device = select(name, Mesh(), DeviceOptions())
    device.start(Mesh())
    return device


@pytest.mark.parametrize("name", ["cpu", "xla", "cuda"])
def test_a_device_keeps_enough_of_a_seed(name: str) -> None:
    """Dropout, attention's dropout and stochastic rounding: seeds of a run's micro-batches and updates, and of regions
    within them, after which the draws outside continue as if nothing had happened."""
    device = device_called(name)
    ones = torch.ones(ELEMENTS).to(device.torch_device)
    found: dict[str, np.ndarray] = {}
    halves = {}

    def draw(where: str) -> None:
        found[where] = device.operations.dropout(ones, 0.5).cpu().numpy() > 0

    for step in range(8):
        for micro_batch in range(4):
            seed = derive_seed(1, "dropout", step, micro_batch)
            device.seed(seed)
            draw(f"{step}.{micro_batch} first")
            with device.random_region(derive_seed(seed, "tensor-parallel region", 1, 0)):
                draw(f"{step}.{micro_batch} region")
            draw(f"{step}.{micro_batch} last")
            device.seed(seed)
            again = [device.operations.dropout(ones, 0.5).cpu().numpy() > 0 for _ in range(2)]
            for mask, wanted in zip(again, ("first", "last"), strict=True):
                assert np.array_equal(mask, found[f"{step}.{micro_batch} {wanted}"])
        device.seed(derive_seed(1, "stochastic rounding", step))
        halves[f"update {step}"] = device.round_stochastically(1 + 2.0**-8 * ones).cpu().numpy() > 1
    assert_independent_masks(found | halves, 0.5)


@pytest.mark.parametrize("name", ["cpu", "xla", "cuda"])
def test_attention_drops_anew_in_each_layer_and_row(name: str) -> None:
    """With equal scores and the identity for values, attention's output is its dropped weights."""
    device = device_called(name)
    S = 64
    to = functools.partial(torch.Tensor.to, device=device.torch_device)
    # A token is a unit vector, twice: once for each head, whose values are what it is given.
    x, nothing, identity = to(torch.eye(S).repeat(2, 1, 2)), to(torch.zeros(2 * S, 2 * S)), to(torch.eye(2 * S))
    layers = [linear(weight, to(torch.zeros(2 * S))) for weight in (nothing, nothing, identity)]
    mask = device.operations.attention_mask(to(torch.ones(2, S, dtype=torch.int64)), None)
    found = {}
    for micro_batch in range(4):
        device.seed(derive_seed(1, "dropout", 0, micro_batch))
        for layer in range(6):
            out = device.operations.self_attention(x, layers, S, mask, 0.5)
            weights = out.view(2, S, 2, S).transpose(1, 2).cpu().numpy()
            for row in range(2):
                for head in range(2):
                    found[f"{micro_batch}, layer {layer}, row {row}, head {head}"] = weights[row, head].reshape(-1) > 0
    assert_independent_masks(found, 0.5)


def test_no_epoch_is_shuffled_like_another() -> None:
    """Over epochs, run seeds and the blocks of an epoch: ranks, scaled to variance 1, in the order of the samples."""
    rows = 2000
    found = {}
    for seed in (0, 1, 12349, 2**31 - 1):
        order = SampleOrder(np.array([rows]), seed=seed, sizes=[BatchSizes(rows)])
        for epoch in range(25):
            found[f"seed {seed}, epoch {epoch}"] = order.step(epoch).row
    ranks = (np.stack(list(found.values())) - (rows - 1) / 2) / np.sqrt((rows**2 - 1) / 12)
    assert_uncorrelated(ranks, names=list(found))


def test_seeds_are_one_hash_of_all_that_they_depend_on() -> None:
    """No two of 200,000 coincide, and no bit is biased; and they never change."""
    seeds = [derive_seed(run, "dropout", step, ustep) for run in (0, 1) for step in range(1000) for ustep in range(100)]
    assert len(set(seeds)) == len(seeds)
    assert min(seeds) >= 0
    bits = (np.array(seeds, np.uint64)[:, None] >> np.arange(63, dtype=np.uint64)) & np.uint64(1)
    assert_mean_zero(bits.T - 0.5, 0.25, names=[f"bit {bit}" for bit in range(63)])
    assert_uncorrelated(bits.T - 0.5, 0.25, names=[f"bit {bit}" for bit in range(63)])
    # The low 32 bits, all that torch's generator for the CPU keeps: n² / 2³³ = 4.7 pairs are expected.
    assert len(seeds) - len({seed % 2**32 for seed in seeds}) < 20
    others = [(1, 2, 3), (1, 23), (1, "2", 3), (12, 3), (1, 3, 2), (-1, 2, 3)]
    found = {derive_seed(run, "dropout", *parts) for run, *parts in others}  # type: ignore[arg-type]
    found.add(derive_seed(1, "stochastic rounding", 2, 3))
    assert len(found) == len(others) + 1
    assert derive_seed(12349, "initial weights", "fc1.weight") == 1629140529603124694
    with pytest.raises(TypeError):
        derive_seed(1, "dropout", np.int64(2))  # type: ignore[arg-type]
