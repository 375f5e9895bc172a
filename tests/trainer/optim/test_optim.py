"""The optimizers match torch's and timm's, the schedules Hugging Face's, the clipping torch's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.support import MODEL
from trainer.devices.cpu import CpuDevice
from trainer.models.bert import BertForPreTraining, has_weight_decay
from trainer.models.config import ModelConfig
from trainer.optim.adamw import AdamW
from trainer.optim.lamb import Lamb
from trainer.optim.parameters import FlatParameters, SeparateParameters
from trainer.optim.rounding import stochastically_rounded
from trainer.optim.schedule import learning_rate, linear_warmup_decay
from trainer.optim.sgd import SGD
from trainer.precision import Precision
from trainer.registry import longest_warmup

transformers = pytest.importorskip("transformers")

Layout = type[FlatParameters] | type[SeparateParameters]
#: Those of google-research/bert's optimizer and the tutorials', spelt out: a change of ours is noticed.
BETAS, EPS = (0.9, 0.999), 1e-6
#: Sizes of gradients: much larger than epsilon, as large as it, and so small that only epsilon divides them.
scales = pytest.mark.parametrize("scale", [1.0, 1e-6, 1e-9])


def small_model() -> BertForPreTraining:
    model = BertForPreTraining(ModelConfig(**MODEL)).double()
    model.initialise(seed=1)
    return model


def fake_backward(model: nn.Module, seed: int, scale: float = 1.0) -> None:
    """Add the same random gradient to each parameter, as autograd would: in place where there is one."""
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in sorted(model.named_parameters()):
        gradient = torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator)
        (parameter * gradient * scale).sum().backward()


def groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """A model's parameters for an optimizer of torch's kind."""
    named = list(model.named_parameters())
    return [
        {
            "params": [p for n, p in named if has_weight_decay(n) is decays],
            "weight_decay": weight_decay if decays else 0.0,
        }
        for decays in (True, False)
    ]


def update(reference: torch.optim.Optimizer, rate: float) -> None:
    for group in reference.param_groups:
        group["lr"] = rate
    reference.step()


layouts = pytest.mark.parametrize("layout", [FlatParameters, SeparateParameters])


@layouts
@scales
@pytest.mark.parametrize("number", [None, lambda value: torch.tensor(value, dtype=torch.float64)])
def test_updates_equal_torchs_adamw_with_clipping(
    layout: Layout, number: Callable[[float], torch.Tensor], scale: float
) -> None:
    ours, theirs = small_model(), copy.deepcopy(small_model())
    parameters = layout(ours, has_weight_decay, 2, Precision("fp64"))
    optimizer = AdamW(parameters, weight_decay=0.01, number=number)
    reference = torch.optim.AdamW(groups(theirs, 0.01), betas=BETAS, eps=EPS)
    for step, rate in enumerate((0.0, 1e-2, 5e-3, 1e-3)):
        parameters.zero_gradients()
        reference.zero_grad()
        for seed in (2 * step, 2 * step + 1):  # two micro-steps
            fake_backward(ours, seed, scale)
            fake_backward(theirs, seed, scale)
        norm = parameters.clip(1.0)
        expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        assert norm.item() == pytest.approx(expected.item(), rel=1e-12)
        optimizer.step(rate)
        update(reference, rate)
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(dict(ours.named_parameters())[name], parameter, rtol=1e-12, atol=1e-15)
        moments = reference.state[parameter]
        for power, moment in enumerate(("exp_avg", "exp_avg_sq"), start=1):
            mine, atol = optimizer.state()[f"{moment}.{name}"], 1e-15 * scale**power
            torch.testing.assert_close(mine, moments[moment], rtol=1e-12, atol=atol)


@layouts
@pytest.mark.parametrize("share", [0.5, 2.0, None])
def test_clipping_is_torchs(layout: Layout, share: float | None) -> None:
    """Gradients are scaled down to a share of their norm, never up, and not at all without a limit."""
    ours, theirs = small_model(), copy.deepcopy(small_model())
    parameters = layout(ours, has_weight_decay, 2, Precision("fp64"))
    fake_backward(ours, 0)
    fake_backward(theirs, 0)
    norm = torch.nn.utils.get_total_norm([p.grad for p in theirs.parameters() if p.grad is not None]).item()
    largest = None if share is None else share * norm
    torch.nn.utils.clip_grad_norm_(theirs.parameters(), float("inf") if largest is None else largest)
    assert parameters.clip(largest).item() == pytest.approx(norm, rel=1e-12)
    ours_now = dict(parameters.named([group.gradients for group in parameters.groups]))
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(ours_now[name], parameter.grad, rtol=1e-12, atol=0)


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
    reference = torch.optim.SGD(groups(theirs, weight_decay), lr=1.0)
    for step, rate in enumerate((0.0, 0.1, 0.05)):
        parameters.zero_gradients()
        reference.zero_grad()
        fake_backward(ours, step)
        fake_backward(theirs, step)
        optimizer.step(rate)
        update(reference, rate)
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(dict(ours.named_parameters())[name], parameter, rtol=1e-12, atol=1e-15)
    assert optimizer.state() == {}


@layouts
@scales
@pytest.mark.parametrize("number", [None, lambda value: torch.tensor([value], dtype=torch.float64)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_updates_equal_timms_lamb(
    layout: Layout, number: Callable[[float], torch.Tensor], weight_decay: float, scale: float
) -> None:
    """timm's is algorithm 2 of the paper with bias-corrected moments, and clips trust ratios at 1."""
    timm = pytest.importorskip("timm.optim")
    ours = small_model()
    with torch.no_grad():
        ours.bert.pooler.dense.weight *= 200  # its ratio is clipped
        ours.cls.seq_relationship.weight.zero_()  # it has none
    theirs = copy.deepcopy(ours)
    parameters = layout(ours, has_weight_decay, 2, Precision("fp64"))
    optimizer = Lamb(parameters, weight_decay=weight_decay, number=number)
    named = list(theirs.named_parameters())
    decayed, rest = groups(theirs, weight_decay)
    reference = timm.Lamb(
        [{**decayed, "always_adapt": True}, {**rest, "always_adapt": False}],
        betas=BETAS, eps=EPS, max_grad_norm=None, trust_clip=True,
    )  # fmt: skip
    for step, rate in enumerate((0.0, 1e-2, 5e-3, 1e-3)):
        parameters.zero_gradients()
        reference.zero_grad()
        fake_backward(ours, step, scale)
        fake_backward(theirs, step, scale)
        before = {name: parameter.detach().clone() for name, parameter in named}
        optimizer.step(rate)
        update(reference, rate)
        moved = {name: float((p.detach() - before[name]).norm() / before[name].norm()) for name, p in named}
    if scale == 1:
        assert moved["bert.embeddings.word_embeddings.weight"] == pytest.approx(1e-3)  # the rate: it is not clipped
        assert moved["bert.pooler.dense.weight"] < 0.9e-3
    for name, parameter in named:
        torch.testing.assert_close(dict(ours.named_parameters())[name], parameter, rtol=1e-12, atol=1e-15)
        for power, moment in enumerate(("exp_avg", "exp_avg_sq"), start=1):
            mine, atol = optimizer.state()[f"{moment}.{name}"], 1e-15 * scale**power
            torch.testing.assert_close(mine, reference.state[parameter][moment], rtol=1e-12, atol=atol)


def bf16_model() -> BertForPreTraining:
    model = BertForPreTraining(ModelConfig(**MODEL))
    model.initialise(seed=1)
    return model


@layouts
@pytest.mark.parametrize("number", [None, lambda value: torch.tensor(value)])
def test_the_master_copy_is_what_torch_updates_and_the_weights_are_its_rounding(
    layout: Layout, number: Callable[[float], torch.Tensor]
) -> None:
    """The reference: fp32 parameters and torch's AdamW; each step's gradients are those of the rounded weights."""
    ours, theirs = bf16_model(), bf16_model()
    parameters = layout(ours, has_weight_decay, 2, Precision("bf16-master"))
    optimizer = AdamW(parameters, weight_decay=0.01, number=number)
    named = dict(theirs.named_parameters())
    reference = torch.optim.AdamW(groups(theirs, 0.01), lr=1e-3, betas=BETAS, eps=EPS)
    for step in range(4):
        parameters.zero_gradients()
        fake_backward(ours, step)
        sums = dict(parameters.named([group.gradients for group in parameters.groups]))
        for name, parameter in named.items():
            parameter.grad = sums[name].clone()
        optimizer.step(1e-3)
        reference.step()
    masters = parameters.masters()
    assert list(masters) == list(named)
    for name, weight in ours.named_parameters():
        torch.testing.assert_close(masters[name], named[name], rtol=1e-6, atol=1e-9)  # fp32, other kernels
        assert torch.equal(weight, masters[name].bfloat16()), name


@layouts
def test_stochastic_rounding_takes_one_of_the_two_neighbours_of_the_fp32_update(layout: Layout) -> None:
    ours, theirs = bf16_model(), bf16_model()

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return stochastically_rounded(x, torch.Tensor.view)

    parameters = layout(ours, has_weight_decay, 2, Precision("bf16-sr", rounded))
    exact = layout(theirs, has_weight_decay, 2, Precision("bf16-master"))
    with torch.no_grad():  # both begin with what bf16 holds
        for name, master in exact.masters().items():
            master.copy_(dict(ours.named_parameters())[name])
    fake_backward(ours, 0)
    fake_backward(theirs, 0)
    AdamW(parameters, weight_decay=0.01).step(1e-3)
    AdamW(exact, weight_decay=0.01).step(1e-3)
    up = total = 0
    for name, weight in ours.named_parameters():
        wanted = exact.masters()[name]
        nearest = wanted.bfloat16().float()
        ulp = 2.0 ** (torch.floor(torch.log2(wanted.abs().clamp(min=1e-30))) - 7)
        assert ((weight.float() - wanted).abs() < ulp).all(), name
        up, total = up + int((weight.float() != nearest).sum()), total + weight.numel()
    assert 0.2 * total < up < 0.3 * total  # a quarter of evenly spread values goes to the farther neighbour


def test_stochastic_rounding_is_right_on_average() -> None:
    """Compared with the probability by definition; 5 standard deviations of 200,000 draws' share are at most 0.0056."""
    torch.manual_seed(3)
    for low, high in ((1.0, 1.0078125), (-0.50390625, -0.5), (2.0**-126, 2.0**-126 + 2.0**-133)):
        for part in (0.0, 0.1, 0.5, 0.9):
            value = torch.tensor(low + part * (high - low))
            drawn = stochastically_rounded(value.expand(200_000).clone(), torch.Tensor.view)
            below, above = (torch.tensor(end).bfloat16().float() for end in (low, high))
            assert set(drawn.unique().tolist()) <= {below.item(), above.item()}
            probability = ((value - below) / (above - below)).item()
            assert (drawn == above).float().mean().item() == pytest.approx(probability, abs=0.0056)


def test_what_bf16_holds_and_what_is_not_finite_stay() -> None:
    """A carry would turn a NaN whose bits are all ones into a number."""
    every = torch.arange(2**16, dtype=torch.int32).bitwise_left_shift_(16).view(torch.float32)
    kept = stochastically_rounded(every, torch.Tensor.view)
    assert torch.equal(kept.view(torch.int32)[every.isfinite()], every.view(torch.int32)[every.isfinite()])
    odd = torch.tensor([0x7FFFFFFF, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    assert stochastically_rounded(odd.repeat(1000), torch.Tensor.view).isnan().all()
    infinite = torch.tensor([float("inf"), -float("inf")])
    assert torch.equal(stochastically_rounded(infinite, torch.Tensor.view), infinite)


def test_stochastic_rounding_follows_the_devices_seed() -> None:
    device, x = CpuDevice(), torch.randn(1000)
    drawn = []
    for seed in (5, 5, 6):
        device.seed(seed)
        drawn.append(device.round_stochastically(x))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def as_hugging_face(schedule: str, scheduler: Callable[..., Any], *given: int, **options: Any) -> None:
    """Compare 12 steps, 3 of them warm-up, of our `schedule` with Hugging Face's."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    theirs = scheduler(optimizer, *given, **options)
    for step in range(13):
        ours = learning_rate(schedule, step, peak=0.5, warmup_steps=3, max_steps=12, decay_share=0.25)
        assert ours == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12, abs=1e-15), step
        optimizer.step()
        theirs.step()


def test_the_constant_schedule_is_hugging_faces() -> None:
    as_hugging_face("constant", transformers.get_constant_schedule_with_warmup, 3)


def test_the_cosine_schedule_is_hugging_faces() -> None:
    as_hugging_face("cosine", transformers.get_cosine_schedule_with_warmup, 3, 12)


@pytest.mark.parametrize("decay_share", [0.2, 0.35, 1.0])
@pytest.mark.parametrize("max_steps", [10, 99, 100])
def test_the_longest_warm_up_is_the_longest_that_ends_at_the_peak(max_steps: int, decay_share: float) -> None:
    """After a longer one the rate jumps down."""
    given = {"max_steps": max_steps, "decay_share": decay_share}
    ends_at_peak = [
        warmup for warmup in range(max_steps + 1)
        if learning_rate("wsd", warmup, peak=1.0, warmup_steps=warmup, **given) == 1.0  # type: ignore[arg-type]
    ]  # fmt: skip
    assert longest_warmup("wsd", **given) == max(ends_at_peak)  # type: ignore[arg-type]


def test_the_wsd_schedule_is_hugging_faces() -> None:
    """A quarter of the 12 steps is decay."""
    as_hugging_face("wsd", transformers.get_wsd_schedule, 3, 3, num_training_steps=12, decay_type="linear")
