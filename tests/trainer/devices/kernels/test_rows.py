"""The kernels that go through rows, between a layer's products and at the end: compiled on a GPU, interpreted
elsewhere."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

pytest.importorskip("triton", reason="needs Triton, which is for Linux")

from trainer.data.bert_batch import IGNORED
from trainer.devices.kernels import bias_dropout_add_norm, bias_gelu, cross_entropy
from trainer.devices.kernels.rows import programs_for

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: Rounding once to the type of the result, relative to it (to bf16 the interpreter cuts off); fp32: of sums of up to
#: 1,000 numbers.
UNITS = {torch.float32: 2e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-7}
every_type = pytest.mark.parametrize("dtype", UNITS)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that each handles several rows, on a GPU too."""
    monkeypatch.setattr(sys.modules["trainer.devices.kernels.rows"], "_processors", lambda device: 1)
    assert programs_for(torch.zeros(300, 1)) == 8


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=random).to(DEVICE, dtype).requires_grad_()


def assert_true(ours: Callable[..., Tensor], true: Callable[..., Tensor], given: list[Tensor]) -> None:
    """Result and gradients of `ours` are those of `true` in float64, but for rounding once, in each one's type."""
    out = ours(*given)
    gradient = drawn(*out.shape, seed=9).detach().to(out.dtype)
    wide = [x.detach().double().requires_grad_() for x in given]
    expected = true(*wide)
    found = [out, *torch.autograd.grad(out, given, gradient)]
    for one, other in zip(found, [expected, *torch.autograd.grad(expected, wide, gradient.double())], strict=True):
        assert (one.double() - other).norm() <= UNITS[one.dtype] * other.norm(), (one.dtype, one.shape)


@every_type
@pytest.mark.parametrize("columns", [1024, 96, 3])
def test_the_norm_of_a_sum_is_float64s(columns: int, dtype: torch.dtype) -> None:
    """Weights in fp32, as under autocast, and a residual of another type."""
    given = [
        drawn(5, 7, columns, dtype=dtype), drawn(columns, seed=1), drawn(5, 7, columns, seed=2), drawn(columns, seed=3),
        drawn(columns, seed=4),
    ]  # fmt: skip

    def ours(x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
        layer: Any = SimpleNamespace(weight=weight, bias=shift, eps=1e-5)
        return bias_dropout_add_norm(x, bias, residual, layer, 0.0)[0]

    def true(x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
        return F.layer_norm(x + bias + residual, (columns,), weight, shift, 1e-5)

    assert_true(ours, true, given)


@every_type
def test_what_the_norm_gives_twice_has_the_gradients_of_both(dtype: torch.dtype) -> None:
    """Of two uses, added up in fp32; of the second alone."""
    x, bias, residual = drawn(9, 96, dtype=dtype), drawn(96, seed=1), drawn(9, 96, dtype=dtype, seed=2)
    layer, used = nn.LayerNorm(96).to(DEVICE), [drawn(9, 96, dtype=dtype, seed=seed).detach() for seed in (3, 4)]
    given = x, bias, residual, layer.weight, layer.bias
    wide = [one.detach().double().requires_grad_() for one in given]
    for weights in ((1.0, 1.0), (0.0, 1.0)):
        both = bias_dropout_add_norm(x, bias, residual, layer, 0.0)
        assert torch.equal(*both)
        outs = [(one, use) for one, use, weight in zip(both, used, weights, strict=True) if weight]
        ours = torch.autograd.grad([one for one, _ in outs], given, [use for _, use in outs])
        true = F.layer_norm(wide[0] + wide[1] + wide[2], (96,), wide[3], wide[4])
        expected = torch.autograd.grad(true, wide, sum(use.double() for _, use in outs))
        for one, other in zip(ours, expected, strict=True):
            assert (one.double() - other).norm() <= 2 * UNITS[dtype] * other.norm()


def dropped(p: float, rows: int, columns: int, seed: int) -> Tensor:
    """Which numbers were: of ones without a residual, the mean and everything else is positive."""
    x = torch.ones(rows, columns, device=DEVICE)
    torch.manual_seed(seed)
    out = bias_dropout_add_norm(x, 0 * x[0], 0 * x, nn.LayerNorm(columns).to(DEVICE), p)[0]
    return (out < 0).cpu()


@pytest.mark.parametrize("p", [0.1, pytest.param(0.5, marks=pytest.mark.slow)])
def test_a_share_is_dropped_and_no_row_or_column_is_favoured(p: float) -> None:
    """Within five standard deviations of so many independent draws."""
    found = dropped(p, 300, 1024, seed=1).double()
    for dimensions in ((0, 1), (0,), (1,)):
        shares = found.mean(dimensions)
        n = found.numel() / shares.numel()
        assert (shares - p).abs().max() <= 5 * math.sqrt(p * (1 - p) / n) + 2**-17


@pytest.mark.slow
def test_decisions_are_independent_of_each_other() -> None:
    """Eight come from one call of the generator, two from one of its words."""
    one, other = (dropped(0.5, 300, 1024, seed=seed).double() - 0.5 for seed in (1, 2))
    pairs = [(one, other), (one[1:], one[:-1]), (one[8:], one[:-8])]
    pairs += [(one[:, lag:], one[:, :-lag]) for lag in (1, 2, 3, 4, 5, 6, 7, 8, 128, 512)]
    for x, y in pairs:
        assert abs(4 * (x * y).mean().item()) <= 5 / math.sqrt(x.numel())


def test_dropout_scales_what_it_keeps_and_drops_the_same_gradients() -> None:
    columns, p = 512, 0.25
    x, bias, residual = drawn(6, columns), drawn(columns, seed=1), drawn(6, columns, seed=2)
    layer = nn.LayerNorm(columns).to(DEVICE)
    torch.manual_seed(5)
    out = bias_dropout_add_norm(x, bias, residual, layer, p)[0]
    gradient = drawn(6, columns, seed=3).detach()
    found = torch.autograd.grad(out, (x, bias, residual), gradient)
    keep = (found[0] != 0).double()  # all that was not dropped has a gradient
    assert 0.6 < keep.mean() < 0.9
    wide = [one.detach().double().requires_grad_() for one in (x, bias, residual)]
    true = F.layer_norm((wide[0] + wide[1]) * keep / (1 - p) + wide[2], (columns,), eps=layer.eps)
    expected = torch.autograd.grad(true, wide, gradient.double())
    for ours, other in zip((out, *found), (true, *expected), strict=True):
        assert (ours.double() - other).norm() <= UNITS[torch.float32] * other.norm()


def test_the_seed_decides_what_is_dropped() -> None:
    assert torch.equal(dropped(0.5, 9, 100, seed=1), dropped(0.5, 9, 100, seed=1))
    assert not torch.equal(dropped(0.5, 9, 100, seed=1), dropped(0.5, 9, 100, seed=2))


@every_type
@pytest.mark.parametrize("columns", [1500, 24])
def test_gelu_is_float64s(columns: int, dtype: torch.dtype) -> None:
    """The exact one, not its approximation by tanh."""
    given = [drawn(11, columns, dtype=dtype), drawn(columns, seed=1)]
    assert_true(bias_gelu, lambda x, bias: F.gelu(x + bias), given)


@every_type
@pytest.mark.parametrize("words", [5000, 30])
def test_cross_entropy_is_float64s(words: int, dtype: torch.dtype) -> None:
    """Of more words than are handled at a time, and fewer; large logits, too, and rows that are left out."""
    logits = (20 * drawn(9, words, dtype=dtype)).detach().requires_grad_()
    labels = torch.randint(words, (9,), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    labels[3] = IGNORED
    found = cross_entropy(logits, labels, IGNORED)
    (gradient,) = torch.autograd.grad(0.7 * found, logits)
    wide = logits.detach().double().requires_grad_()
    true = F.cross_entropy(wide, labels, ignore_index=IGNORED, reduction="sum")
    (expected,) = torch.autograd.grad(0.7 * true, wide)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), true, rtol=1e-5, atol=0)
    assert (gradient.double() - expected).norm() <= max(UNITS[dtype], 1e-5) * expected.norm()
    assert not gradient[3].any()


def operators() -> list[tuple[Any, tuple[Any, ...]]]:
    x, vector, residual = drawn(4, 16), drawn(16, seed=1), drawn(4, 16, seed=2)
    labels = torch.tensor([1, IGNORED, 0, 15], device=DEVICE)
    return [
        (torch.ops.bert_pretraining.bias_dropout_add_norm.default, (x, vector, residual, vector, vector, 0.1, 1e-12)),
        (torch.ops.bert_pretraining.bias_gelu.default, (x, vector)),
        (torch.ops.bert_pretraining.cross_entropy.default, (x, labels, IGNORED)),
    ]


@pytest.mark.parametrize("number", range(3))
def test_torch_takes_them_for_sound_operators(number: int) -> None:
    torch.library.opcheck(*operators()[number])
