"""Training BERT, all of it, is a loop of Hugging Face's model and torch's optimizer over rows read with h5py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.helpers.support import metrics, tensors, train, write_dataset, write_model_config
from trainer.data.batch_ramp import BatchSizes
from trainer.data.order import SampleOrder
from trainer.models.bert import BertForPreTraining
from trainer.models.config import ModelConfig

transformers = pytest.importorskip("transformers")

ROWS, STEPS, WARMUP, RATE, DECAY, NORM, RATIO = 24, 6, 2, 3e-3, 0.3, 2.0, 0.4


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "data", [ROWS])


def batch(data: Path, rows: np.ndarray) -> dict[str, Tensor]:
    """What `BertForPreTraining.forward` takes. The files have NVIDIA's names; 0 fills up the masked positions."""
    (path,) = data.glob("*.hdf5")
    with h5py.File(path) as file:
        column = {name: torch.from_numpy(file[name][:].astype(np.int64)[rows]) for name in file}
    labels = torch.full_like(column["input_ids"], -100)
    for row, (positions, ids) in enumerate(zip(column["masked_lm_positions"], column["masked_lm_ids"], strict=True)):
        some = positions > 0
        labels[row, positions[some]] = ids[some]
    return {
        "input_ids": column["input_ids"],
        "attention_mask": column["input_mask"],
        "token_type_ids": column["segment_ids"],
        "labels": labels,
        "next_sentence_label": column["next_sentence_labels"],
    }


class Muon:
    """Jordan et al. 2024, with the scale of Liu et al. 2025 and decoupled weight decay, in float64."""

    def __init__(self, matrices: list[nn.Parameter]) -> None:
        self.momenta = [(matrix, torch.zeros_like(matrix)) for matrix in matrices]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for matrix, momentum in self.momenta:
            assert matrix.grad is not None
            momentum.mul_(0.95).add_(0.05 * matrix.grad)
            u, s, vt = torch.linalg.svd(0.05 * matrix.grad + 0.95 * momentum, full_matrices=False)
            s = s / s.norm()
            for _ in range(5):
                s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
            update = 0.2 * max(matrix.shape) ** 0.5 * (u * s) @ vt
            matrix.mul_(1 - rate * DECAY).sub_(rate * update)


def reference(
    data: Path, config: ModelConfig, seed: int, optimizer: str, weight: float
) -> tuple[list[list[float]], list[float], nn.Module]:
    """(each step's sum of losses, masked-LM and next-sentence loss, gradient norms, model after all steps), in
    float64. `weight`: what the next-sentence loss is multiplied by in the sum."""
    start = BertForPreTraining(config)
    start.initialise(seed)
    model = transformers.BertForPreTraining(
        transformers.BertConfig(**config.to_hugging_face(), attn_implementation="eager")
    ).double()
    initial = dict(start.named_parameters())
    for name, parameter in model.named_parameters():
        parameter.data.copy_(initial[name].data)
    named = dict(model.named_parameters())
    muon: Callable[[float], None] | None = None
    ratio = 1.0
    if optimizer == "Muon":
        matrices = [p for name, p in named.items() if name.startswith("bert.encoder.") and p.ndim == 2]
        named = {name: p for name, p in named.items() if not any(p is one for one in matrices)}
        muon, ratio = Muon(matrices).step, RATIO
    without = ("bias", "LayerNorm")  # as the tutorial's script spells it
    adamw = torch.optim.AdamW(
        [
            {"params": [p for n, p in named.items() if not any(w in n for w in without)], "weight_decay": DECAY},
            {"params": [p for n, p in named.items() if any(w in n for w in without)], "weight_decay": 0.0},
        ],
        lr=RATE * ratio, betas=(0.9, 0.999), eps=1e-6,
    )  # fmt: skip
    schedule = transformers.get_linear_schedule_with_warmup(adamw, WARMUP, STEPS)
    order = SampleOrder(np.array([ROWS]), seed=seed, sizes=[BatchSizes(8)])
    curve, norms = [], []
    for step in range(STEPS):
        given = batch(data, order.step(step).row)
        out = model(**given)
        masked_lm = nn.functional.cross_entropy(out.prediction_logits.transpose(1, 2), given["labels"])
        next_sentence = nn.functional.cross_entropy(out.seq_relationship_logits, given["next_sentence_label"])
        torch.testing.assert_close(masked_lm + next_sentence, out.loss)
        loss = masked_lm + weight * next_sentence
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), NORM)))
        if muon is not None:
            muon(adamw.param_groups[0]["lr"] / ratio)
        adamw.step()
        schedule.step()
        model.zero_grad()
        curve.append([value.item() for value in (loss, masked_lm, next_sentence)])
    return curve, norms, model


@pytest.mark.parametrize(
    ("optimizer", "seed", "weight"), [("AdamW", 12349, 1), ("AdamW", 7, 0.1), ("Muon", 7, 1), ("Muon", 7, 3)]
)
def test_training_is_hugging_faces_model_and_torchs_optimizer(
    data: Path, tmp_path: Path, optimizer: str, seed: int, weight: float
) -> None:
    """Reader, order, initial weights, masked head, both losses and their sum, micro-steps, clipping, decay groups,
    rates and updates. Tolerance: float64's rounding, which six steps of Adam, whose first divides by small numbers,
    enlarge."""
    model = write_model_config(tmp_path, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    done = train(
        data_dir=data, model_config=model, output_dir=tmp_path / "out", device="cpu", precision="fp64", seed=seed,
        batch_size=4, grad_accum_usteps=2, max_pred_len=5, lr=RATE, warmup_steps=WARMUP, max_steps=STEPS,
        weight_decay=DECAY, max_grad_norm=NORM, optimizer=optimizer, adamw_lr_ratio=RATIO, ckpt_interval_steps=0,
        next_sentence_weight=weight,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    config = ModelConfig.of_hugging_face(json.loads(model.read_text()))
    curve, norms, theirs = reference(data, config, seed, optimizer, weight)
    logged = metrics(tmp_path / "out")
    names = ("loss", "masked_lm_loss", "next_sentence_loss")
    np.testing.assert_allclose([[one[name] for name in names] for one in logged], curve, rtol=1e-8)
    np.testing.assert_allclose([one["grad_norm"] for one in logged], norms, rtol=1e-8)
    assert min(norms) < NORM < max(norms), "some are clipped, and some are not"
    saved = tensors(tmp_path / "out" / "checkpoints" / f"ckpt_{STEPS}")
    expected = {name: parameter.detach().numpy() for name, parameter in theirs.named_parameters()}
    assert expected.keys() == {name for name in saved if not name.startswith(("exp_avg", "momentum_buffer"))}
    for name, values in expected.items():
        np.testing.assert_allclose(saved[name], values, rtol=1e-7, atol=1e-9, err_msg=name)
