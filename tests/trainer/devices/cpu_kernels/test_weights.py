"""Gradients that kernels add to their sums themselves are those that autograd would have added."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from torch import nn

from tests.trainer.devices.gradient_sums import require_autograds_sums
from trainer.devices import cpu_kernels
from trainer.devices.cpu_kernels import operators
from trainer.devices.cpu_operations import CpuOperations
from trainer.precision import Precision

pytestmark = pytest.mark.skipif(cpu_kernels.library() is None, reason="needs a C compiler")


class Table(nn.Embedding):
    is_split = False


@pytest.mark.parametrize("name", ["autocast", "fp32", "fp64"])
def test_sums_are_autograds_bit_by_bit(name: str) -> None:
    require_autograds_sums(CpuOperations(), Precision(name), "cpu")


def test_words_that_come_often_and_padding() -> None:
    """A word's gradients are added in their order; padding, whose row stays 0, has none."""
    ids = torch.tensor([[3, 0, 3, 1], [3, 5, 0, 3]])
    table = Table(6, 5, padding_idx=0)
    table.weight.gradient_sum = total = torch.ones(6, 5)  # type: ignore[attr-defined]
    rows = CpuOperations().embedding(ids, table)
    assert torch.equal(rows, table.weight[ids])
    seed = torch.randn(2, 4, 5)
    rows.backward(seed)
    assert table.weight.grad is None
    expected = torch.ones(6, 5, dtype=torch.float64)
    for word, gradient in zip(ids.flatten().tolist(), seed.flatten(0, 1), strict=True):
        if word:
            expected[word] += gradient
    torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_add_to_shared_sums_without_losing_any(request: pytest.FixtureRequest, dtype: torch.dtype) -> None:
    """Five words 4,096 times; a race between threads would lose gradients, and not the same ones each time."""
    request.addfinalizer(functools.partial(torch.set_num_threads, torch.get_num_threads()))
    words, width = 5, 33
    ids = torch.randint(0, words, (4096,))
    gradient, layer = torch.randn(4096, width, dtype=dtype), torch.randn(257, 129, dtype=dtype)
    expected = torch.zeros(words, width, dtype=torch.float64).index_add_(0, ids, gradient.double())
    expected[2] = 0
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        for _ in range(20):
            total, sums = torch.zeros(words, width), torch.ones(257, 129)
            functions = operators.functions()
            functions.call("embedding_backward", dtype, gradient, ids, total, len(ids), width, 2)
            functions.call("add", dtype, layer, sums, layer.numel())
            torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-3)
            assert torch.equal(sums, 1 + layer.float())
            if threads == 1:
                first = total
            assert torch.equal(total, first), "the same bytes for any number of threads"


@pytest.mark.parametrize("context", [contextlib.nullcontext, torch.no_grad])
def test_elsewhere_gradients_are_autograds(context: type[contextlib.AbstractContextManager[None]]) -> None:
    """Without sums, as in an evaluation or under DDP, weights are used as they are."""
    layer, table, operations = nn.Linear(4, 4), Table(6, 4), CpuOperations()
    with context(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert operations.weight(layer.weight) is layer.weight
        out = operations.embedding(torch.tensor([[1, 2]]), table)
    if out.requires_grad:
        out.sum().backward()
        assert table.weight.grad is not None
        assert table.weight.grad[1:3].eq(1).all()
