"""Gradients that kernels add to their sums themselves are those that autograd would have added."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from tests.helpers.support import MODEL, synthetic_rows
from tests.trainer.models.test_bert import batch_of
from trainer.devices import cpu_kernels
from trainer.devices.cpu_operations import CpuOperations
from trainer.models.bert import WORD_EMBEDDINGS, BertForPreTraining
from trainer.models.config import ModelConfig
from trainer.optim.parameters import FlatParameters
from trainer.precision import Precision

pytestmark = pytest.mark.skipif(cpu_kernels.library() is None, reason="needs a C compiler")


class Table(nn.Embedding):
    is_split = False


@pytest.mark.parametrize("name", ["autocast", "fp32", "fp64"])
def test_sums_are_autograds_bit_by_bit(name: str) -> None:
    """Over two steps of two micro-steps, weights changing in between: in the second, converted weights are new."""
    operations, precision = CpuOperations(), Precision(name)
    batches = [batch_of(synthetic_rows(3, seq_len=32, max_pred_len=5, seed=seed)) for seed in (1, 2)]
    sums = []
    for by_kernels in (True, False):
        model = BertForPreTraining(ModelConfig(**MODEL).without_dropout(), operations).to(precision.dtype)
        model.initialise(seed=1)
        parameters = FlatParameters(model, lambda _: True, 1, precision)
        for parameter in model.parameters():
            assert parameter.gradient_sum is parameter.grad  # type: ignore[attr-defined]
            if not by_kernels:
                del parameter.gradient_sum
        for _ in range(2):
            parameters.zero_gradients()
            with precision.step_context("cpu"), operations.step_context():
                for batch in batches:
                    with precision.forward_context("cpu"):
                        losses = model(batch)
                    sum(losses).backward()
            with torch.no_grad():
                for weight in parameters.groups[0].weights:
                    weight *= 0.9
        sums.append(dict(parameters.named([group.gradients for group in parameters.groups])))
    for (which, one), other in zip(sums[0].items(), sums[1].values(), strict=True):
        assert one.abs().max() > 0, which
        if which == WORD_EMBEDDINGS:  # autograd adds those of both uses before it adds them to the sum
            rounding = torch.finfo(one.dtype).eps * other.abs().max()
            assert (one - other).abs().max() <= 4 * rounding
        else:
            assert torch.equal(one, other), which


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
