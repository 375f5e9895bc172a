"""The CPU's kernels compared with torch's operations in float64, for every type of numbers.

bf16 results may be off by half a unit in the last place, fp32 ones by a few units: sums of up to 300 terms.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.data.bert_batch import IGNORED
from trainer.devices import cpu_kernels
from trainer.devices.cpu_kernels import operators
from trainer.devices.cpu_kernels.attention import Group

pytestmark = pytest.mark.skipif(cpu_kernels.library() is None, reason="needs a C compiler")

#: Type, and the largest error allowed, relative to the largest number of the result.
TYPES = [(torch.float64, 1e-14), (torch.float32, 2e-6), (torch.bfloat16, 2.0**-8)]
every_type = pytest.mark.parametrize(("dtype", "error"), TYPES, ids=["float64", "float32", "bfloat16"])
#: Rows and columns that fill neither units of 16 rows, nor blocks of rows, nor vectors.
SHAPES = [(1, 1), (5, 7), (37, 96), (16 * 64 + 5, 33)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def draws(*shapes: tuple[int, ...], dtype: torch.dtype, scale: float = 1.0) -> Iterator[Tensor]:
    """Random leaves of this type."""
    generator = torch.Generator().manual_seed(1)
    for shape in shapes:
        yield (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()


def weights_type(dtype: torch.dtype) -> torch.dtype:
    """That of the weights which autocast uses with numbers of this type."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def assert_same(
    ours: Callable[..., Tensor], exact: Callable[..., Tensor], given: list[Tensor], error: float, *, times: float = 1.0
) -> None:
    """Both give the same, and the same gradients, relative to the largest; gradients may be off by `times` as much."""
    wide = [tensor.detach().double().requires_grad_() for tensor in given]
    out, expected = ours(*given), exact(*wide)
    (seed,) = draws(tuple(out.shape), dtype=out.dtype)
    found = torch.autograd.grad(out, given, seed.detach())
    wanted = torch.autograd.grad(expected, wide, seed.detach().double())
    for one, other, allowed in zip(
        (out, *found), (expected, *wanted), (error, *(times * error,) * len(found)), strict=True
    ):
        assert (one.double() - other).abs().max() <= allowed * other.abs().max().clamp(min=1.0)
    assert [gradient.dtype for gradient in found] == [tensor.dtype for tensor in given]


@every_type
@every_shape
def test_gelu_is_torchs(dtype: torch.dtype, error: float, shape: tuple[int, int]) -> None:
    (x,) = draws(shape, dtype=dtype, scale=3.0)
    (bias,) = draws(shape[1:], dtype=weights_type(dtype))
    assert_same(cpu_kernels.bias_gelu, lambda x, bias: F.gelu(x + bias), [x, bias], error)


def test_gelus_tail_has_no_cancellation() -> None:
    """Far below 0 it is x times a tiny share: torch's own in fp32, 1 + erf(x / √2), is 0 below -5.6."""
    x = torch.linspace(-6, -3, 1000)[:, None].requires_grad_()
    out = cpu_kernels.bias_gelu(x, torch.zeros(1))
    exact = x.double() * 0.5 * torch.special.erfc(-x.double() * 0.5**0.5)
    assert ((out.double() - exact) / exact).abs().max() < 2e-3  # the formula's error, relative to the tail
    assert (out.double() - exact).abs().max() < 3e-7


@every_type
@every_shape
def test_the_norm_is_torchs(dtype: torch.dtype, error: float, shape: tuple[int, int]) -> None:
    product, residual = draws(shape, shape, dtype=dtype)
    bias, weight, shift = draws(*3 * [shape[1:]], dtype=weights_type(dtype))

    def ours(product: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
        norm = nn.LayerNorm(shape[1], eps=1e-3)
        del norm.weight, norm.bias
        norm.weight, norm.bias = weight, shift  # type: ignore[assignment]
        return cpu_kernels.bias_dropout_add_norm(product, bias, residual, norm, 0.0)[0]

    def exact(product: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
        return F.layer_norm(product + bias + residual, shape[1:], weight, shift, eps=1e-3)

    # The gradient of a row is a difference of sums of its numbers, times 1 / its standard deviation.
    assert_same(ours, exact, [product, bias, residual, weight, shift], error, times=8.0)


def test_what_the_norm_gives_twice_has_the_gradients_of_both() -> None:
    """Of two uses, and of either alone."""
    shape, norm = (37, 96), nn.LayerNorm(96, dtype=torch.float64)
    given = [one.requires_grad_() for one in draws(shape, shape[1:], shape, dtype=torch.float64)]
    uses = list(draws(shape, shape, dtype=torch.float64))
    for which in ([0, 1], [0], [1]):
        both = cpu_kernels.bias_dropout_add_norm(*given, norm, 0.0)
        assert torch.equal(*both)
        ours = torch.autograd.grad([both[i] for i in which], given, [uses[i] for i in which])
        exact = torch.autograd.grad(norm(given[0] + given[1] + given[2]), given, sum(uses[i] for i in which))
        torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)


def kept_by(p: float, shape: tuple[int, int]) -> Tensor:
    """What the norm's dropout keeps of `shape`, for the state of torch's generator: what was 1 is negative if not."""
    norm = nn.LayerNorm(shape[1], dtype=torch.float64)
    ones = torch.ones(shape, dtype=torch.float64)
    out = cpu_kernels.bias_dropout_add_norm(ones, 0 * ones[0], 0 * ones, norm, p)[0]
    return (out > 0).double()


@every_type
@pytest.mark.parametrize("shape", [(37, 96), (16 * 64 + 5, 33)], ids=str)
def test_the_norm_drops_the_same_forward_and_backward(dtype: torch.dtype, error: float, shape: tuple[int, int]) -> None:
    """The product is dropped, with its bias; neither the residual nor the result is. Kept numbers are scaled."""
    product, residual = draws(shape, shape, dtype=dtype)
    (bias,) = draws(shape[1:], dtype=weights_type(dtype))
    norm = nn.LayerNorm(shape[1], dtype=weights_type(dtype))
    torch.manual_seed(5)
    kept = kept_by(0.25, shape)
    assert 0.2 < 1 - kept.mean() < 0.3
    torch.manual_seed(5)

    def exact(product: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return F.layer_norm((product + bias) * kept / 0.75 + residual, shape[1:])

    def ours(product: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return cpu_kernels.bias_dropout_add_norm(product, bias, residual, norm, 0.25)[0]

    assert_same(ours, exact, [product, bias, residual], error, times=8.0)


@every_type
@pytest.mark.parametrize("n", [1, 31, 4096, 3 * 4096 + 17])
def test_dropout_keeps_or_zeroes(dtype: torch.dtype, error: float, n: int) -> None:
    """What is kept is x times the scale, rounded once; the gradient of a number is scaled or zeroed as it is."""
    (x,) = draws((n,), dtype=dtype)
    torch.manual_seed(2)
    out = cpu_kernels.dropout(x, 0.25)
    kept = out != 0
    assert torch.equal(out[kept], (x.detach() * (65536 / 49152))[kept])
    (gradient,) = torch.autograd.grad(out, x, torch.ones_like(out))
    assert torch.equal(gradient, kept.to(dtype) * (65536 / 49152))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_dropped_is_nothing_whatever_it_was(dtype: torch.dtype) -> None:
    """What is kept stays infinite or NaN, so that a broken training is noticed; strided numbers are taken, too."""
    x = torch.tensor([[torch.inf, torch.nan]] * 500).to(dtype).T
    out = cpu_kernels.dropout(x, 0.5)
    assert 400 < (out == 0).sum() < 600
    assert torch.equal((out[0] == torch.inf).sum() + out[1].isnan().sum(), (out != 0).sum())


@every_type
@pytest.mark.parametrize("operation", ["gelu", "norm", "softmax", "cross-entropy"])
def test_not_a_number_stays_one(dtype: torch.dtype, error: float, operation: str) -> None:
    x = torch.zeros(3, 5, dtype=dtype)
    x[1, 2] = torch.nan
    zeros = torch.zeros(5, dtype=weights_type(dtype))
    if operation == "gelu":
        assert cpu_kernels.bias_gelu(x, zeros).isnan().sum() == 1
    elif operation == "softmax":
        weights = torch.empty_like(x)
        given = x, torch.full((1,), 5, dtype=torch.int32), weights, weights
        operators.functions().call("softmax_forward", dtype, *given, *x.shape, 3, 1.0, 0, 0)
        assert weights.isnan().sum(1).tolist() == [0, 5, 0]
    elif operation == "norm":
        norm = nn.LayerNorm(5, dtype=weights_type(dtype))
        out = cpu_kernels.bias_dropout_add_norm(x, zeros, torch.zeros_like(x), norm, 0.0)[0]
        assert out.isnan().sum(1).tolist() == [0, 5, 0]
    else:
        assert cpu_kernels.cross_entropy(x, torch.zeros(3, dtype=torch.int64), IGNORED).isnan()


def sfc64(seed: int, unit: int, blocks: int) -> Tensor:
    """numpy's SFC64, eight of them side by side, from states of splitmix64: (blocks · 32) 16-bit numbers."""

    def splitmix64(index: int) -> int:
        z = (seed + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    words = []
    for lane in range(8):
        generator = np.random.SFC64()
        state = generator.state
        first = 3 * (8 * unit + lane)
        state["state"]["state"] = np.array([*(splitmix64(first + i) for i in range(3)), 1], dtype=np.uint64)
        generator.state = state
        words.append(generator.random_raw(12 + blocks)[12:])
    return torch.from_numpy(np.stack(words, 1).astype("<u8").view("<u2").astype(np.int64)).flatten()


def test_random_bits_are_those_of_sfc64() -> None:
    """numpy's generator decides the same, in the first unit of 4,096 numbers and in the second."""
    torch.manual_seed(7)
    seed = int(torch.randint(2**63 - 1, ()))
    torch.manual_seed(7)
    kept = cpu_kernels.dropout(torch.ones(2 * 4096), 0.3) != 0
    expected = torch.cat([sfc64(seed, unit, 128) for unit in (0, 1)]) >= round(0.3 * 65536)
    assert torch.equal(kept, expected)


def test_rows_are_decided_independently() -> None:
    """No two of 2,000 rows of the norm's dropout correlate by more than chance: 2 million pairs, 6 deviations."""
    rows, columns = 2000, 256
    torch.manual_seed(3)
    kept = kept_by(0.5, (rows, columns)) - 0.5
    correlations = (4 * kept @ kept.T / math.sqrt(columns)).fill_diagonal_(0)
    assert correlations.abs().max() < 6
    assert abs(correlations.square().mean() - 1) < 0.01
    assert abs(kept.mean()) < 5 * 0.5 / math.sqrt(rows * columns)


@pytest.mark.parametrize("size", [1.0, 30.0])
@every_type
def test_cross_entropy_is_torchs(dtype: torch.dtype, error: float, size: float) -> None:
    (logits,) = draws((20, 1003), dtype=dtype, scale=size)
    labels = torch.randint(1003, (20,), generator=torch.Generator().manual_seed(0))
    labels[[2, 18, 19]] = IGNORED
    ours = functools.partial(cpu_kernels.cross_entropy, labels=labels, ignored=IGNORED)
    exact = functools.partial(F.cross_entropy, target=labels, ignore_index=IGNORED, reduction="sum")
    wide = logits.detach().double().requires_grad_()
    loss, expected = ours(logits), exact(wide)
    assert loss.dtype == weights_type(dtype)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-14 if dtype == torch.float64 else 1e-6, atol=0)
    (found,), (wanted,) = torch.autograd.grad(loss, logits), torch.autograd.grad(expected, wide)
    assert (found.double() - wanted).abs().max() <= error
    assert not found[[2, 18, 19]].any()


def test_a_label_that_is_no_word_is_refused() -> None:
    with pytest.raises(IndexError, match=r"2 labels are not in \[0, 7\)"):
        cpu_kernels.cross_entropy(torch.zeros(3, 7), torch.tensor([7, -1, 3]), IGNORED)


def test_everything_can_be_dropped() -> None:
    x = torch.full((100,), 3.0, requires_grad=True)
    out = cpu_kernels.dropout(x, 1.0)
    assert not out.any()
    assert not torch.autograd.grad(out.sum(), x)[0].any()


def test_any_number_of_threads_gives_the_same_bytes(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(functools.partial(torch.set_num_threads, torch.get_num_threads()))
    norm, results = nn.LayerNorm(96), []
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        torch.manual_seed(1)
        product, residual = draws((517, 96), (517, 96), dtype=torch.bfloat16)
        (bias,) = draws((96,), dtype=torch.float32)
        out = cpu_kernels.bias_dropout_add_norm(cpu_kernels.bias_gelu(product, bias), bias, residual, norm, 0.1)[0]
        group = Group(0, 11, 47, 47, torch.arange(11, dtype=torch.int32) + 37)
        sequences = cpu_kernels.Sequences([group], 517)
        out = cpu_kernels.dropout(cpu_kernels.attention(out.repeat(1, 3), bias.repeat(3), sequences, 4, 0.1), 0.1)
        loss = cpu_kernels.cross_entropy(out, torch.arange(517) % 96, IGNORED)
        results.append([loss, *torch.autograd.grad(loss, [product, residual, bias, norm.weight, norm.bias])])
    for others in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(results[0], others, strict=True))


def test_blocks_are_whole_units() -> None:
    """Random bits begin anew at each unit of rows; a block that began within one would draw others backward."""
    for rows in (1, 16, 17, 2048, 2049, 100_000):
        block, blocks = operators._blocks(rows)
        assert block % 16 == 0
        assert (blocks - 1) * block < rows <= blocks * block
        assert blocks <= 64
