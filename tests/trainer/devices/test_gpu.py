"""The GPU itself: its kernels against float64, its training against the CPU's, resumes to the byte, no waiting."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.helpers.support import assert_same_bytes, forked, losses, options, train, write_dataset
from trainer.models.varlen_attention import varlen_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

COMMON = {"lr": 3e-3, "warmup_steps": 5, "ckpt_interval_steps": 0, "batch_size": 4, "grad_accum_usteps": 4}
#: From one token to longer than a tile of the kernels; one is empty.
LENGTHS = (1, 512, 37, 0, 128, 129, 300)
TOKENS = sum(LENGTHS)


@pytest.fixture
def bounds() -> Tensor:
    return torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32, device="cuda")


def attended(dtype: torch.dtype, bounds: Tensor, head_size: int, dropout_p: float = 0.0) -> list[Tensor]:
    """The result for random queries, keys and values, views of one tensor, and their gradients; then what these are in
    float64, by torch's own attention of each sequence alone, without dropout."""
    random = torch.Generator().manual_seed(0)
    drawn = torch.randn(TOKENS, 4, 4 * head_size, generator=random).to("cuda", dtype)
    *given, gradient = drawn.chunk(4, dim=2)
    for x in given:
        x.requires_grad_()
    out = varlen_attention(*given, bounds, max(LENGTHS), dropout_p)
    ours = [out, *torch.autograd.grad(out, given, gradient)]
    exact = [x.detach().double().requires_grad_() for x in given]
    parts = zip(*(x.transpose(0, 1).split(LENGTHS, dim=1) for x in exact), strict=True)
    true = torch.cat([F.scaled_dot_product_attention(*part) for part in parts], dim=1).transpose(0, 1)
    return [*ours, true, *torch.autograd.grad(true, exact, gradient.double())]


@pytest.mark.parametrize("head_size", [64, 20, 128, 256])
@pytest.mark.parametrize(("dtype", "unit"), [(torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)])
def test_attention_is_that_of_float64_but_for_rounding(
    bounds: Tensor, dtype: torch.dtype, unit: float, head_size: int
) -> None:
    """Weights and result are each rounded once to `dtype`, and so are the scores' gradients: a few units, relative to
    the whole tensor."""
    found = attended(dtype, bounds, head_size)
    for ours, true in zip(found[:4], found[4:], strict=True):
        assert (ours.double() - true).norm() <= 2 * unit * true.norm()


def test_dropped_weights_are_a_share_and_the_others_are_scaled(bounds: Tensor) -> None:
    """With the identity as values the result is the attention weights themselves. The gradient of the values must drop
    the same ones."""
    length, p = 128, 0.25
    random = torch.Generator().manual_seed(0)
    query, key, gradient = (torch.randn(64 * length, 8, length, generator=random).cuda().bfloat16() for _ in range(3))
    value = torch.eye(length, device="cuda").bfloat16()[None].repeat(64, 1, 1).flatten(0, 1)[:, None].repeat(1, 8, 1)
    value.requires_grad_()
    starts = torch.arange(0, 64 * length + 1, length, dtype=torch.int32, device="cuda")
    with torch.no_grad():
        whole = varlen_attention(query, key, value, starts, length, 0.0).float()
    torch.cuda.manual_seed(7)
    weights = varlen_attention(query, key, value, starts, length, p)
    (d_value,) = torch.autograd.grad(weights, value, gradient)
    kept = weights.detach().float()
    dropped = (kept == 0) & (whole > 0)
    count = int((whole > 0).sum())
    # The kernel compares 8 random bits, so the share is a multiple of 1/256; five standard deviations beside it.
    share = int(dropped.sum()) / count
    assert abs(share - p) <= 5 * (p * (1 - p) / count) ** 0.5 + 1 / 256
    rest = ~dropped
    assert (kept[rest] - whole[rest] / (1 - p)).norm() <= 2 * 2.0**-8 * kept.norm()
    # No row, column, head or sequence is favoured.
    for dimension in (1, 2):
        shares = dropped.double().mean(tuple(d for d in range(3) if d != dimension)).cpu()
        n = dropped.numel() / len(shares)
        assert (shares - share).abs().max() <= 5 * (p * (1 - p) / n) ** 0.5
    weights, gradient = (x.detach().view(64, length, 8, length).permute(0, 2, 1, 3) for x in (weights, gradient))
    expected = (weights.double().transpose(2, 3) @ gradient.double()).permute(0, 2, 1, 3).reshape(d_value.shape)
    assert (d_value.double() - expected).norm() <= 2 * 2.0**-8 * expected.norm()


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_attention_has_the_same_bits_every_time(bounds: Tensor, dropout_p: float) -> None:
    """The kernel's default adds up a query's gradient with atomics."""
    found = []
    for _ in range(10):
        torch.cuda.manual_seed(1)
        found.append(attended(torch.bfloat16, bounds, 64, dropout_p)[:4])
    for again in found[1:]:
        assert all(map(torch.equal, found[0], again))


def run(data: Path, model: Path, out: Path, **values: Any) -> Path:
    done = train(data_dir=data, model_config=model, output_dir=out, **{"device": "cuda", **COMMON, **values})
    assert done.returncode == 0, done.stdout
    return out


@pytest.mark.parametrize(
    ("precision", "tolerance"), [("fp64", 1e-8), ("fp32", 1e-4), ("autocast", 0.01), ("bf16-master", 0.01)]
)
def test_the_loss_curve_is_the_cpus(data: Path, model: Path, tmp_path: Path, precision: str, tolerance: float) -> None:
    """Other kernels sum in another order: rounding, which grows over 20 steps; bf16 against the CPU's fp32."""
    given = {"disable_dropout": True, "max_steps": 20, "max_pred_len": 5}
    on_cpu = run(
        data, model, tmp_path / "cpu", device="cpu", precision="fp64" if precision == "fp64" else "fp32", **given
    )
    found = run(data, model, tmp_path / "gpu", precision=precision, **given)
    assert losses(on_cpu)[-1] < losses(on_cpu)[0] - 0.05
    np.testing.assert_allclose(losses(found), losses(on_cpu), rtol=tolerance)


@pytest.mark.parametrize(
    ("precision", "optimizer", "compiled"),
    [
        ("autocast", "AdamW", False), ("autocast", "Muon", False), ("fp32", "LAMB", False), ("bf16-sr", "Muon", False),
        ("bf16-master", "LAMB", False), ("autocast", "AdamW", True),
    ],
)  # fmt: skip
def test_a_killed_run_ends_with_the_same_bytes(
    data: Path, model: Path, tmp_path: Path, precision: str, optimizer: str, compiled: bool
) -> None:
    """With dropout; the run crosses the end of an epoch."""
    cache = {"compile": True, "compile_cache": tmp_path / "cache"} if compiled else {}
    given = {
        "precision": precision, "optimizer": optimizer, "max_steps": 14, "ckpt_interval_steps": 5, "max_pred_len": 5,
        **cache,
    }  # fmt: skip
    whole = run(data, model, tmp_path / "whole", **given)
    out = tmp_path / "killed"
    values = {"device": "cuda", **COMMON, **given}
    killed = train(data_dir=data, model_config=model, output_dir=out, env={"FAILPOINT": "step:8.0"}, **values)
    assert killed.returncode == -9, killed.stdout
    run(data, model, out, resume_ckpt=True, **given)
    assert_same_bytes(out / "checkpoints" / "ckpt_14", whole / "checkpoints" / "ckpt_14")


def test_phase_2_starts_from_the_gpus_checkpoint_on_a_cpu(data: Path, model: Path, tmp_path: Path) -> None:
    """A checkpoint does not say which device wrote it; the first loss is the same but for rounding."""
    first = run(data, model, tmp_path / "phase1", max_steps=6, precision="fp32", max_pred_len=5)
    longer = write_dataset(tmp_path / "data2", [60], seq_len=64, max_pred_len=9)
    given = {
        "phase2": True, "resume_ckpt": True, "resume_ckpt_path": first / "checkpoints" / "ckpt_6", "phase1_end_step": 6,
        "max_steps": 2, "warmup_steps": 1, "max_pred_len": 9, "precision": "fp32", "disable_dropout": True,
    }  # fmt: skip
    found = [losses(run(longer, model, tmp_path / device, device=device, **given)) for device in ("cuda", "cpu")]
    np.testing.assert_allclose(*found, rtol=1e-5)


@pytest.mark.parametrize("optimizer", ["AdamW", "LAMB", "Muon"])
@pytest.mark.parametrize("precision", ["autocast", "fp32", "bf16-sr"])
def test_no_step_waits_for_the_gpu(data: Path, model: Path, tmp_path: Path, optimizer: str, precision: str) -> None:
    """A whole training, with real kernels and dropout."""
    words = options(
        data_dir=data, model_config=model, output_dir=tmp_path, device="cuda", precision=precision, max_steps=8,
        optimizer=optimizer, max_pred_len=5, **COMMON,
    )  # fmt: skip
    done = forked("tests.trainer.devices.no_waiting", *words)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == "watched 6 steps"


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_waiting_is_noticed() -> None:
    """The test above relies on this."""
    x = torch.ones(1, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            x.item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("precision", ["fp32", "autocast"])
def test_the_self_test_accepts_it(tmp_path: Path, precision: str) -> None:
    words = options(device="cuda", output_dir=tmp_path, precision=precision, model="mini", batch_size=16)
    done = forked("trainer", "--self-test", *words)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1].startswith("self-test passed: ")
