"""The optimizer is torch's AdamW, the schedule Hugging Face's, the clipping torch's."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.support import MODEL
from trainer.config import ModelConfig
from trainer.models.bert import BertForPreTraining, has_weight_decay
from trainer.optim.adamw import BETA1, BETA2, EPSILON, AdamW
from trainer.optim.parameters import FlatParameters, SeparateParameters
from trainer.optim.schedule import learning_rate, linear_warmup_decay
from trainer.optim.sgd import SGD
from trainer.precision import Precision

transformers = pytest.importorskip("transformers")

Layout = type[FlatParameters] | type[SeparateParameters]


def small_model() -> BertForPreTraining:
    model = BertForPreTraining(ModelConfig(**MODEL)).double()
    model.initialise(seed=1)
    return model


def fake_backward(model: nn.Module, seed: int) -> None:
    """Add the same random gradient to each parameter, as autograd would: in place where there is one."""
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in sorted(model.named_parameters()):
        gradient = torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator)
        (parameter * gradient).sum().backward()


layouts = pytest.mark.parametrize("layout", [FlatParameters, SeparateParameters])


@layouts
@pytest.mark.parametrize("number", [None, lambda value: torch.tensor(value, dtype=torch.float64)])
def test_updates_equal_torchs_adamw_with_clipping(layout: Layout, number: Callable[[float], torch.Tensor]) -> None:
    ours, theirs = small_model(), copy.deepcopy(small_model())
    parameters = layout(ours, has_weight_decay, 2, Precision("fp64"))
    optimizer = AdamW(parameters, weight_decay=0.01, number=number)
    named = list(theirs.named_parameters())
    reference = torch.optim.AdamW(
        [
            {"params": [p for n, p in named if has_weight_decay(n)], "weight_decay": 0.01},
            {"params": [p for n, p in named if not has_weight_decay(n)], "weight_decay": 0.0},
        ],
        betas=(BETA1, BETA2),
        eps=EPSILON,
    )
    for step, rate in enumerate((0.0, 1e-2, 5e-3, 1e-3)):
        parameters.zero_gradients()
        reference.zero_grad()
        for seed in (2 * step, 2 * step + 1):  # two micro-steps
            fake_backward(ours, seed)
            fake_backward(theirs, seed)
        norm = parameters.clip(1.0)
        expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        assert norm.item() == pytest.approx(expected.item(), rel=1e-12)
        for group in reference.param_groups:
            group["lr"] = rate
        optimizer.step(rate)
        reference.step()
    for name, parameter in named:
        torch.testing.assert_close(dict(ours.named_parameters())[name], parameter, rtol=1e-12, atol=1e-15)
        moments = reference.state[parameter]
        for moment in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(optimizer.state()[f"{moment}.{name}"], moments[moment], rtol=1e-12, atol=1e-18)


@layouts
def test_a_replaced_gradient_is_noticed(layout: Layout) -> None:
    model = small_model()
    parameters = layout(model, has_weight_decay, 2, Precision("fp64"))
    weight = model.cls.seq_relationship.weight
    weight.grad = torch.zeros_like(weight)
    with pytest.raises(AssertionError, match="seq_relationship"):
        parameters.reduce(lambda tensors: None)


@pytest.mark.parametrize(("warmup", "total"), [(0, 10), (3, 10), (10, 10)])
def test_the_schedule_is_hugging_faces(warmup: int, total: int) -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    scheduler = transformers.get_linear_schedule_with_warmup(optimizer, warmup, total)
    for step in range(total):
        ours = linear_warmup_decay(step, peak=0.5, warmup_steps=warmup, max_steps=total)
        assert ours == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        optimizer.step()
        scheduler.step()


@layouts
@pytest.mark.parametrize("number", [None, lambda value: torch.tensor([value], dtype=torch.float64)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_updates_equal_torchs_sgd(layout: Layout, number: Callable[[float], torch.Tensor], weight_decay: float) -> None:
    ours, theirs = small_model(), copy.deepcopy(small_model())
    parameters = layout(ours, has_weight_decay, 2, Precision("fp64"))
    optimizer = SGD(parameters, weight_decay=weight_decay, number=number)
    named = list(theirs.named_parameters())
    reference = torch.optim.SGD(
        [
            {"params": [p for n, p in named if has_weight_decay(n)], "weight_decay": weight_decay},
            {"params": [p for n, p in named if not has_weight_decay(n)], "weight_decay": 0.0},
        ],
        lr=1.0,
    )
    for step, rate in enumerate((0.0, 0.1, 0.05)):
        parameters.zero_gradients()
        reference.zero_grad()
        fake_backward(ours, step)
        fake_backward(theirs, step)
        for group in reference.param_groups:
            group["lr"] = rate
        optimizer.step(rate)
        reference.step()
    for name, parameter in named:
        torch.testing.assert_close(dict(ours.named_parameters())[name], parameter, rtol=1e-12, atol=1e-15)
    assert optimizer.state() == {}


def test_the_constant_schedule_is_hugging_faces() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    scheduler = transformers.get_constant_schedule_with_warmup(optimizer, 3)
    for step in range(8):
        ours = learning_rate("constant", step, peak=0.5, warmup_steps=3, max_steps=8)
        assert ours == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        optimizer.step()
        scheduler.step()
