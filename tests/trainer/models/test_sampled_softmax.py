"""Sampled softmax: what it draws, and how its losses and gradients compare with those of the whole vocabulary."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.helpers.chance import assert_flat
from tests.helpers.small_language import trainer_here, write_language
from tests.helpers.support import (
    VOCAB,
    assert_one_line_error,
    assert_resumed,
    assert_same_bytes,
    metrics,
    synthetic_rows,
    train,
    write_model_config,
)
from tests.trainer.models.test_bert import CONFIG, batch_of
from trainer.data.bert_batch import IGNORED
from trainer.devices.cpu_operations import CpuOperations
from trainer.models.bert import BertForPreTraining
from trainer.models.sampled_softmax import draw_candidates, sampled_words

V, H = 1000, 16


def decoder(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights (V, H), biases (V,) and inputs (60, H) of logits that range over several nats."""
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(V, H, dtype=torch.float64, generator=draw) / 2
    bias = -torch.arange(1, V + 1, dtype=torch.float64).log()
    return weight, bias, torch.randn(60, H, dtype=torch.float64, generator=draw)


def labels_of(weight: torch.Tensor, bias: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Labels drawn by the model itself, and two places without one."""
    labels = torch.distributions.Categorical(logits=F.linear(x, weight, bias)).sample()
    labels[[3, 17]] = IGNORED
    return labels


def test_all_labels_are_candidates_and_every_other_word_is_as_likely() -> None:
    torch.manual_seed(1)
    labels = torch.randint(0, 40, (60,))
    labels[5] = IGNORED
    seen = np.zeros(V)
    for _ in range(3000):
        ids, offsets, places = draw_candidates(labels, V, 20)
        assert len(ids) == 80
        assert (ids.diff() > 0).all()
        assert torch.equal(torch.where(places < 0, places, ids[places.clamp(min=0)]), labels)
        assert not offsets[places[places >= 0]].any()
        seen[ids.numpy()] += 1
    known = np.unique(labels.clamp(min=0))  # [PAD] stands in for what has no label
    assert (seen[known] == 3000).all()
    assert_flat(np.delete(seen, known))
    different = len(known)
    stands_for = math.log((V - different) / (80 - different))
    assert sorted(set(offsets.tolist())) == pytest.approx([0, stands_for])


def test_draws_are_independent_of_each_other_and_repeatable() -> None:
    labels = torch.arange(10)
    torch.manual_seed(1)
    first, second = (set(draw_candidates(labels, V, 300)[0].tolist()) - set(range(10)) for _ in range(2))
    # The size of an intersection of 300 and 300 of 990 is hypergeometric: mean 90.9, standard deviation 6.7.
    assert len(first) == len(second) == 300
    assert abs(len(first & second) - 90.9) < 5 * 6.7
    torch.manual_seed(1)
    assert first == set(draw_candidates(labels, V, 300)[0].tolist()) - set(range(10))


def test_the_loss_is_the_papers() -> None:
    """-s(y) + log of a sum of exponentials, in which a drawn word counts as often as there are words it stands for."""
    weight, bias, x = decoder()
    torch.manual_seed(2)
    labels = labels_of(weight, bias, x)
    known = labels[labels >= 0]
    torch.manual_seed(3)
    ids, _, _ = draw_candidates(labels, V, 200)
    torch.manual_seed(3)
    weights, biases, places = sampled_words(weight, bias, labels, 200)
    loss = CpuOperations().cross_entropy(F.linear(x, weights, biases), places)
    scores = (x @ weight.T + bias).numpy()
    certain = sorted({0, *known.tolist()})
    drawn = sorted(set(ids.tolist()) - set(certain))
    times = (V - len(certain)) / len(drawn)
    sums = np.exp(scores[:, certain]).sum(1) + times * np.exp(scores[:, drawn]).sum(1)
    is_known = (labels >= 0).numpy()
    expected = (np.log(sums[is_known]) - scores[is_known, known.numpy()]).sum()
    assert float(loss) == pytest.approx(expected, rel=1e-8)  # the offset is fp32


@pytest.mark.parametrize(("drawn", "off"), [(300, 0.06), (600, 0.02)])
def test_sums_and_gradients_have_the_expectation_of_the_whole_vocabularys(drawn: int, off: float) -> None:
    """A gradient is a ratio, so its expectation is `off` by a share that falls as (V - N) / N, the sums' variance: here
    4 % with 300 of 1,000 words, and 1 % with 600. Without offsets it is another one."""
    weight, bias, x = decoder()
    torch.manual_seed(4)
    labels = labels_of(weight, bias, x)
    leaves = [tensor.requires_grad_() for tensor in (weight, bias, x)]
    logits = F.linear(x, weight, bias)
    whole = torch.autograd.grad(F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum"), leaves)
    totals, sums, plain = [torch.zeros_like(leaf) for leaf in leaves], [], torch.zeros_like(x)
    draws = 1500
    for _ in range(draws):
        ids, offsets, places = draw_candidates(labels, V, drawn)
        own = F.linear(x, weight[ids], bias[ids])
        sums.append((own + offsets).exp().sum(1).detach())
        loss = F.cross_entropy(own + offsets, places, ignore_index=IGNORED, reduction="sum")
        for total, gradient in zip(totals, torch.autograd.grad(loss, leaves, retain_graph=True), strict=True):
            total += gradient
        uncorrected = F.cross_entropy(own, places, ignore_index=IGNORED, reduction="sum")
        plain += torch.autograd.grad(uncorrected, [x])[0]
    found, expected = torch.stack(sums), logits.exp().sum(1).detach()
    z = (found.mean(0) - expected) / (found.std(0) / draws**0.5)
    assert z.abs().max() < 5  # 60 comparisons: 3e-5 by chance
    for total, gradient in zip(totals, whole, strict=True):
        assert (total / draws - gradient).norm() < off * gradient.norm()
    assert (plain / draws - whole[2]).norm() > 2 * off * whole[2].norm()


@pytest.mark.parametrize("drawn", [V - 60, 10 * V])
def test_as_many_words_as_there_are_make_the_whole_loss(drawn: int) -> None:
    weight, bias, x = decoder()
    labels = labels_of(weight, bias, x)
    labels[:] = torch.arange(60)  # all different: 60 labels and V - 60 drawn are all words
    weights, biases, places = sampled_words(weight, bias, labels, drawn)
    assert torch.equal(weights, weight)
    loss = F.cross_entropy(F.linear(x, weights, biases), places, reduction="sum")
    assert float(loss) == pytest.approx(float(F.cross_entropy(F.linear(x, weight, bias), labels, reduction="sum")))


def test_only_training_is_sampled() -> None:
    """Evaluation has the whole vocabulary, as `logits` always has."""
    batch = batch_of(synthetic_rows(8, seq_len=32, max_pred_len=5, seed=3))
    whole, sampled = BertForPreTraining(CONFIG), BertForPreTraining(CONFIG, sampled_softmax=20)
    for model in (whole, sampled):
        model.initialise(seed=1)
    assert torch.equal(whole.eval()(batch)[0], sampled.eval()(batch)[0])
    assert sampled.logits(batch)[0].shape[1] == CONFIG.vocab_size
    assert not torch.equal(whole.train()(batch)[0], sampled.train()(batch)[0])


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "autocast", "bf16-master"])
def test_a_language_is_learned_as_well(tmp_path: Path, precision: str) -> None:
    """On the same batches, with a fifth of the words: by the loss over all of them, of the last steps' batches.
    Sampling costs 0.02 to 0.04 nats here, which is less than seeds differ by (4.06, 4.17, 4.29)."""
    data = write_language(tmp_path / "data")
    given: dict[str, Any] = {"steps": 250, "precision": precision, "optimizer": "AdamW"}
    reached = {}
    for drawn in (0, 50):
        trainer, _ = trainer_here(data, tmp_path / str(drawn), initial={"sampled_softmax": drawn}, **given)
        assert trainer.train()
        model = trainer.model.eval()
        steps = list(trainer.dataloader.load(240, 250))
        with torch.no_grad():
            losses = [float(model(batch)[0]) for step in steps for batch in step.micro_batches]
        reached[drawn] = sum(losses) / sum(step.counts[0] for step in steps)
    assert reached[0] < 5.2  # frequencies alone: 5.4
    assert reached[50] == pytest.approx(reached[0], abs=0.1)


def test_a_resumed_run_ends_with_the_same_bytes(data: Path, model: Path, tmp_path: Path) -> None:
    given = {
        "data_dir": data, "model_config": model, "device": "cpu", "max_steps": 6, "warmup_steps": 1, "batch_size": 4,
        "grad_accum_usteps": 2, "max_pred_len": 5, "sampled_softmax": 30, "ckpt_interval_steps": 2, "lr": 1e-3,
    }  # fmt: skip
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert train(**given, output_dir=whole).returncode == 0
    assert train(**given, output_dir=killed, env={"FAILPOINT": "step:5.0"}).returncode == -9
    refused = train(**{**given, "sampled_softmax": 0}, output_dir=killed, resume_ckpt=True)
    assert_one_line_error(refused, "sampled_softmax = 30, this run has 0", "--allow_changes sampled_softmax")
    done = train(**given, output_dir=killed, resume_ckpt=True)
    assert done.returncode == 0, done.stdout
    assert_resumed(done, {"resume_ckpt": True})
    assert_same_bytes(killed / "checkpoints" / "ckpt_6", whole / "checkpoints" / "ckpt_6")


def test_ranks_that_share_a_model_draw_from_their_own_words(data: Path, tmp_path: Path) -> None:
    """With all words, the losses are those of the whole vocabulary; with some, an estimate of them. No number of ranks
    divides the vocabulary: what pads it is never drawn."""
    given = {
        "data_dir": data, "model_config": write_model_config(tmp_path, vocab_size=VOCAB + 1), "device": "cpu",
        "precision": "fp64", "max_steps": 4, "warmup_steps": 1, "grad_accum_usteps": 1, "max_pred_len": 5,
        "disable_dropout": True, "batch_size": 8, "lr": 1e-3, "ckpt_interval_steps": 0,
    }  # fmt: skip
    losses = {}
    for workers, drawn in ((1, 0), (2, 10_000), (2, 40)):
        out = tmp_path / f"{workers}-{drawn}"
        layout = {"tensor_parallel_size": workers, "sampled_softmax": drawn, "output_dir": out}
        assert train(workers, **given, **layout).returncode == 0
        losses[drawn] = np.array([step["masked_lm_loss"] for step in metrics(out)])
    np.testing.assert_allclose(losses[10_000], losses[0], rtol=1e-6)  # the offsets are fp32
    assert not np.allclose(losses[40], losses[0], rtol=1e-6)
    # Logits are small, so each of the 180 or so words' exponentials is about 1, and the estimated sum is nearly exact.
    np.testing.assert_allclose(losses[40], losses[0], atol=0.02)
