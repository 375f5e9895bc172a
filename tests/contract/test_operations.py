"""What every device's operations promise; each device's implementation passes the same tests."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from trainer.devices.cpu_operations import CpuOperations
from trainer.devices.cuda_operations import CudaOperations
from trainer.models.operations import Operations

IMPLEMENTATIONS = [Operations(), CpuOperations(), CudaOperations()]
every = pytest.mark.parametrize("ops", IMPLEMENTATIONS, ids=lambda ops: type(ops).__name__)


@every
@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("shape", [(1000, 1001), (7,)])
def test_dropout_zeroes_a_share_and_scales_the_rest(ops: Operations, p: float, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    y = ops.dropout(x, p)
    dropped = y == 0
    # The share of n independent draws: within 5 standard deviations of p (and 2⁻¹⁷ of rounding).
    n = x.numel()
    assert abs(dropped.double().mean().item() - p) < 5 * math.sqrt(p * (1 - p) / n) + 2**-17
    torch.testing.assert_close(y[~dropped], x[~dropped] / (1 - p), rtol=2e-5, atol=0)
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    assert torch.equal(x.grad == 0, dropped)
    torch.testing.assert_close(x.grad[~dropped], torch.full_like(x.grad[~dropped], 1 / (1 - p)), rtol=2e-5, atol=0)


@every
def test_dropout_is_decided_by_the_seed(ops: Operations) -> None:
    x = torch.ones(1000)
    masks = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        masks.append(ops.dropout(x, 0.1))
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])


@every
def test_neighbouring_draws_are_independent(ops: Operations) -> None:
    """Four decisions come from one random word on the CPU, of eight in turn: no lag from 1 to 8 may correlate."""
    torch.manual_seed(3)
    dropped = (ops.dropout(torch.ones(1_000_000), 0.5) == 0).double() - 0.5
    for lag in range(1, 9):
        correlation = 4 * (dropped[lag:] * dropped[:-lag]).mean().item()
        assert abs(correlation) < 5 / math.sqrt(1_000_000)


def attention_by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("bahd,bakd->bahk", q, k) / math.sqrt(q.shape[-1])
    return torch.einsum("bahk,bakd->bahd", torch.softmax(scores.masked_fill(~mask, -torch.inf), -1), v)


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 9, 4, dtype=torch.float64, generator=generator).to(dtype) for _ in range(3))
    mask = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    mask[0, ..., 5:] = False
    return q, k, v, mask


@every
@pytest.mark.parametrize("dropout_p", [0.0, 1e-9], ids=["none", "one that drops nothing"])
def test_attention_is_that_of_vaswani(ops: Operations, dropout_p: float) -> None:
    q, k, v, mask = inputs(torch.float64)
    out = ops.attention(q, k, v, mask, dropout_p)
    # At p = 1e-9, dropout scales by 1 + 1e-9.
    torch.testing.assert_close(out, attention_by_hand(q, k, v, mask), rtol=dropout_p + 1e-12, atol=1e-11)


@every
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_never_sees_what_is_masked(ops: Operations, dropout_p: float, dtype: torch.dtype) -> None:
    q, k, v, mask = inputs(dtype)
    torch.manual_seed(0)
    before = ops.attention(q, k, v, mask, dropout_p)
    k[0, :, 5:], v[0, :, 5:] = 1e4, -1e4
    torch.manual_seed(0)
    after = ops.attention(q, k, v, mask, dropout_p)
    assert torch.equal(before, after)
    assert torch.isfinite(after).all()


@every
def test_attention_drops_weights_not_outputs(ops: Operations) -> None:
    """The mean over many draws is the attention without dropout, to within 6 standard errors."""
    q, k, v, mask = inputs(torch.float64)
    torch.manual_seed(1)
    draws = torch.stack([ops.attention(q, k, v, mask, 0.3) for _ in range(2000)])
    error = draws.std(0) / math.sqrt(len(draws))
    assert ((draws.mean(0) - attention_by_hand(q, k, v, mask)).abs() < 6 * error + 1e-12).all()
    assert (draws.std(0) > 0).all()


@pytest.mark.slow
@every
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_packed_sequences_do_not_see_each_other(ops: Operations, dropout_p: float) -> None:
    """Two sequences and padding in the first row, one sequence in the second."""
    torch.manual_seed(0)
    layers, x = [nn.Linear(12, 12).double() for _ in range(3)], torch.randn(2, 9, 12, dtype=torch.float64)
    q, k, v = (layer(x).unflatten(2, (3, 4)).transpose(1, 2) for layer in layers)
    ids = torch.tensor([[1, 1, 1, 1, 2, 2, 2, 0, 0], [1] * 9])
    cu_seqlens = torch.tensor([0, 4, 7, 9, 18])
    look = (ids[:, None, :, None] == ids[:, None, None, :]) & (ids > 0)[:, None, None, :]
    look |= torch.eye(9, dtype=torch.bool) & (ids == 0)[:, None, :, None]  # a softmax over nothing is NaN
    mask = ops.attention_mask(ids, cu_seqlens)
    times = 1000 if dropout_p else 1
    draws = torch.stack([ops.self_attention(x, layers, 4, mask, dropout_p) for _ in range(times)])
    expected, real = attention_by_hand(q, k, v, look).transpose(1, 2).flatten(2), (ids > 0)[..., None].expand_as(x)
    error = draws.std(0) / math.sqrt(len(draws)) if dropout_p else torch.zeros_like(x)
    assert ((draws.mean(0) - expected).abs() < 6 * error + 1e-12)[real].all()


@every
def test_projections_are_those_of_each_layer(ops: Operations) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(16, width).double() for width in (8, 24, 8)]
    x = torch.randn(3, 5, 16, dtype=torch.float64, requires_grad=True)
    found, expected = ops.projections(x, layers), [layer(x) for layer in layers]
    inputs = [x, *(parameter for layer in layers for parameter in layer.parameters())]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)
    gradients = [torch.autograd.grad(sum(y.square().sum() for y in ys), inputs) for ys in (found, expected)]  # type: ignore
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)
