"""Initial weights of all models are independent draws of the published distributions."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
import torch

from tests.helpers.chance import assert_mean_zero, assert_uncorrelated
from trainer.models.base import Model
from trainer.models.bert import BertForPreTraining
from trainer.models.config import PRESETS, ModelConfig
from trainer.models.mlp import MLP

#: Numbers of a tensor that are compared with those of every other.
PREFIX = 16_384


def initialised(preset: str, seed: int) -> Model:
    """`preset`'s model, or the MLP, without ever drawing torch's own initial values."""
    with torch.device("meta"):
        model = MLP() if preset == "mlp" else BertForPreTraining(ModelConfig.preset(preset))
    model.to_empty(device="cpu")
    model.initialise(seed)
    return model


def draws(model: Model) -> dict[str, np.ndarray]:
    """A model's random tensors, by name: the first `PREFIX` numbers of each, scaled to variance 1."""
    found = {}
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if isinstance(model, MLP):
            inputs = getattr(model, name.split(".")[0]).in_features
            scale = math.sqrt(3 * inputs)  # uniform within ±1/√inputs
        elif name.endswith("bias") or "LayerNorm" in name:
            continue
        else:
            scale = 1 / 0.02
            if name == "bert.embeddings.word_embeddings.weight":
                values = values[1:]  # [PAD] is 0
        found[name] = scale * values.reshape(-1)[:PREFIX].astype(np.float64)
    return found


def by_length(found: dict[str, np.ndarray]) -> list[tuple[list[str], np.ndarray]]:
    """Names and rows, in as few blocks as needed for every tensor to have at least half of its numbers in one."""
    blocks = []
    names = sorted(found, key=lambda name: len(found[name]))
    while names:
        length = len(found[names[0]])
        blocks.append((names, np.stack([found[name][:length] for name in names])))
        names = [name for name in names if len(found[name]) > 2 * length]
    return blocks


def assert_no_two_runs_alike(found: dict[str, np.ndarray]) -> None:
    """No pair of successive numbers occurs twice, in this tensor or another: about 62 random bits at 10⁶ positions."""
    windows = []
    for values in found.values():
        bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
        windows.append(bits[:-1] << np.uint64(32) | bits[1:])
    every = np.concatenate(windows)
    assert len(np.unique(every)) == len(every)


@pytest.mark.parametrize(
    "preset", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("base", "large"))) for name in (*PRESETS, "mlp")]
)
def test_no_tensor_of_a_preset_tells_of_another(preset: str) -> None:
    found = draws(initialised(preset, seed=12349))
    assert len(found) == (6 if preset == "mlp" else 6 + 6 * PRESETS[preset][0])
    assert_no_two_runs_alike(found)
    for names, rows in by_length(found):
        if len(names) > 1:
            assert_uncorrelated(rows, names=names)


def test_run_seeds_have_weights_of_their_own() -> None:
    """Neighbouring seeds, those that differ in one high bit, and the largest."""
    seeds = [*range(12), 12349, 2**16, 2**30, 2**31 - 1]
    for preset in ("debug", "mlp"):
        found = {f"{seed} {name}": x for seed in seeds for name, x in draws(initialised(preset, seed)).items()}
        assert_no_two_runs_alike(found)
        for names, rows in by_length(found):
            assert_uncorrelated(rows, names=names)


@pytest.mark.parametrize("preset", ["mini", "mlp"])
def test_every_tensor_has_the_published_distribution(preset: str) -> None:
    """Mean, variance and shape, the last by the Kolmogorov-Smirnov test: √n · D exceeds 3 once in 10⁷."""
    found = draws(initialised(preset, seed=12349))
    normal = np.vectorize(NormalDist().cdf, otypes=[float])
    for name, x in found.items():
        assert_mean_zero(x[None], names=[name], unit=2)
        assert_mean_zero(x[None] ** 2 - 1, 2.0, names=[f"{name}, squared"], unit=4)
        uniform = (x / math.sqrt(3) + 1) / 2 if preset == "mlp" else normal(x)
        steps = np.arange(len(x) + 1) / len(x)
        order = np.sort(uniform)
        distance = max((steps[1:] - order).max(), (order - steps[:-1]).max())
        assert distance * math.sqrt(len(x)) < 3, name


def test_a_generator_that_keeps_too_few_bits_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    default_rng = np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda seed: default_rng(seed & 0xF))
    with pytest.raises(AssertionError, match="the same random numbers"):
        initialised("tiny", seed=1)
