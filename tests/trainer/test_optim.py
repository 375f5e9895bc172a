"""The optimizer is torch's AdamW, the schedule Hugging Face's, the clipping torch's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.support import MODEL
from trainer.config import ModelConfig
from trainer.models.bert import BertForPreTraining, has_weight_decay
from trainer.optim.adamw import BETAS, EPSILON, AdamW
from trainer.optim.buffers import ParameterBuffers
from trainer.optim.schedule import linear_warmup_decay

transformers = pytest.importorskip("transformers")


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


def test_flat_updates_equal_torchs_adamw_with_clipping() -> None:
    ours, theirs = small_model(), copy.deepcopy(small_model())
    buffers = ParameterBuffers(ours, has_weight_decay)
    optimizer = AdamW(buffers, weight_decay=0.01)
    named = list(theirs.named_parameters())
    reference = torch.optim.AdamW(
        [
            {"params": [p for n, p in named if has_weight_decay(n)], "weight_decay": 0.01},
            {"params": [p for n, p in named if not has_weight_decay(n)], "weight_decay": 0.0},
        ],
        betas=BETAS,
        eps=EPSILON,
    )
    for step, rate in enumerate((0.0, 1e-2, 5e-3, 1e-3)):
        buffers.start_step()
        reference.zero_grad()
        for seed in (2 * step, 2 * step + 1):  # two micro-steps
            fake_backward(ours, seed)
            fake_backward(theirs, seed)
        norm = buffers.clip(1.0)
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


def test_a_replaced_gradient_is_noticed() -> None:
    model = small_model()
    buffers = ParameterBuffers(model, has_weight_decay)
    weight = model.cls.seq_relationship.weight
    weight.grad = torch.zeros_like(weight)
    with pytest.raises(AssertionError, match="seq_relationship"):
        buffers.reduce(lambda tensor: None)


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
