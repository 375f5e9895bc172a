"""What is measured on held-out data is what Hugging Face's model gives, and what torch gives for the MLP."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from stages.directory.manifest import Identity, StageDirectory
from stages.evaluation import mlp
from stages.evaluation.bert import evaluate
from tests.helpers.images import write_images
from tests.helpers.support import MODEL, assert_one_line_error, forked, synthetic_rows
from trainer.data.file_names import HELD_OUT_SHARDS
from trainer.data.shards import MASKED_KEYS, ShardSet, write_shard
from trainer.devices.cpu import CpuDevice
from trainer.models.bert import BertForPreTraining
from trainer.models.config import ModelConfig
from trainer.models.mlp import MLP
from trainer.workloads.mnist import HELD_OUT, Images

ROWS = 31


@pytest.fixture
def ours() -> BertForPreTraining:
    """With dropout, which must have no effect, and weights large enough that logits differ."""
    model = BertForPreTraining(ModelConfig(**{**MODEL, "initializer_range": 0.3}))
    model.initialise(seed=1)
    return model


def hugging_faces(ours: BertForPreTraining) -> Any:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.BertForPreTraining(transformers.BertConfig(**ours.config.to_hugging_face()))
    theirs.load_state_dict(ours.state_dict(), strict=False)
    theirs.tie_weights()
    return theirs.eval()


def measured(ours: BertForPreTraining, data: Path, out: Path, *, max_samples: int = 10_000) -> dict[str, Any]:
    with StageDirectory.begin(out, lambda: Identity("evaluate", 1)) as work:
        return evaluate(
            work, ours, ShardSet.open(data, HELD_OUT_SHARDS), device=CpuDevice(), batch_size=4, max_samples=max_samples
        )


@torch.no_grad()
def test_it_measures_what_hugging_face_computes(ours: BertForPreTraining, tmp_path: Path) -> None:
    """Row by row, without padding. The labels are chosen so that about two thirds of the masks and half of the pairs
    are right, and the wrong ones are what the model deems least likely."""
    theirs, rng = hugging_faces(ours), np.random.default_rng(0)
    arrays = synthetic_rows(ROWS, seq_len=32, max_pred_len=5, seed=0)
    words, pairs, masks = [], [], 0
    right_words = right_pairs = 0
    for row in range(ROWS):
        length = int(arrays["input_mask"][row].sum())
        ids, segments = (
            torch.from_numpy(arrays[name][row : row + 1, :length].astype(np.int64))
            for name in ("input_ids", "segment_ids")
        )
        out = theirs(ids, token_type_ids=segments)
        for at, position in enumerate(arrays["masked_lm_positions"][row]):
            if position:
                logits = out.prediction_logits[0, int(position)]
                is_right = rng.random() < 2 / 3
                arrays["masked_lm_ids"][row, at] = label = int(logits.argmax() if is_right else logits.argmin())
                words.append(F.cross_entropy(logits, torch.tensor(label)).item())
                right_words += is_right
                masks += 1
        logits = out.seq_relationship_logits[0]
        is_right = row % 2 == 0
        arrays["next_sentence_labels"][row] = label = int(logits.argmax() if is_right else logits.argmin())
        pairs.append(F.cross_entropy(logits, torch.tensor(label)).item())
        right_pairs += is_right
    write_shard(tmp_path / "x_test_0.hdf5", arrays)
    found = measured(ours, tmp_path, tmp_path / "out")
    expected = {
        "samples": ROWS,
        "masked_tokens": masks,
        "masked_lm_loss": pytest.approx(np.mean(words), rel=1e-4),  # fp32
        "next_sentence_loss": pytest.approx(np.mean(pairs), rel=1e-4),
        "masked_lm_accuracy": pytest.approx(right_words / masks),
        "next_sentence_accuracy": pytest.approx(right_pairs / ROWS),
    }
    assert {name: found[name] for name in expected} == expected


def test_next_sentences_are_measured_where_model_and_shards_have_them(ours: BertForPreTraining, tmp_path: Path) -> None:
    """A model of the other kind, or shards of the other kind, give the same masked-LM scores."""
    masked_lm = BertForPreTraining(dataclasses.replace(ours.config, next_sentence=False))
    masked_lm.load_state_dict({name: ours.state_dict()[name] for name in masked_lm.state_dict()})
    arrays = synthetic_rows(ROWS, seq_len=32, max_pred_len=5, seed=0)
    scores = {}
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
        write_shard(tmp_path / name / "x_test_0.hdf5", arrays)
        for kind, model in (("both", ours), ("masked", masked_lm)):
            scores[name, kind] = measured(model, tmp_path / name, tmp_path / f"{name} {kind}")
        arrays.pop("next_sentence_labels", None)
    whole = scores["with", "both"]
    assert {"next_sentence_loss", "next_sentence_accuracy"} < whole.keys()
    expected = {name: value for name, value in whole.items() if "next_sentence" not in name}
    assert [scores[one] for one in scores if one != ("with", "both")] == [expected] * 3


@pytest.mark.parametrize("seen", ["masked_lm_positions", "masked token in the 31 sequences"])
def test_shards_without_masks_are_refused_in_one_line(ours: BertForPreTraining, tmp_path: Path, seen: str) -> None:
    """Those that the trainer masks, and those whose every place for a mask is unused."""
    arrays = synthetic_rows(ROWS, seq_len=32, max_pred_len=5, seed=0)
    for key in MASKED_KEYS:
        if seen == MASKED_KEYS[0]:
            del arrays[key]
        else:
            arrays[key][:] = 0
    write_shard(tmp_path / "x_test_0.hdf5", arrays)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(ours.config.to_hugging_face()))
    save_file(dict(ours.named_parameters()), model / "model.safetensors")
    done = forked("stages.evaluate", model, tmp_path, "--device", "cpu", "--out", tmp_path / "out")
    assert_one_line_error(done, f"*_test_*.hdf5 shards of {tmp_path} have no {seen}", "give a directory where they are")


def test_a_folder_without_shards_is_refused(ours: BertForPreTraining, tmp_path: Path) -> None:
    """But not a data set of which nothing was held out: the chain goes on without an evaluation."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(ours.config.to_hugging_face()))
    save_file(dict(ours.named_parameters()), model / "model.safetensors")
    (tmp_path / "data").mkdir()
    given = ("stages.evaluate", model, tmp_path / "data", "--device", "cpu", "--out", tmp_path / "out")
    assert_one_line_error(
        forked(*given), f"{tmp_path / 'data'} has no shards, neither *_test_*", "name the folder that"
    )
    write_shard(tmp_path / "data" / "x_training_0.hdf5", synthetic_rows(3, seq_len=32, max_pred_len=5, seed=0))
    done = forked(*given)
    assert done.returncode == 0, done.stdout
    assert "nothing was held out" in done.stdout


def save_in_form(model: BertForPreTraining, directory: Path, form: str) -> Path:
    """The model in one of the forms that Hugging Face has used."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(model.config.to_hugging_face()))
    tensors = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    if form == "old names":
        kinds = {"weight": "gamma", "bias": "beta"}
        tensors = {
            f"{stem}.{kinds[kind]}" if stem.endswith("LayerNorm") else name: tensor
            for name, tensor in tensors.items()
            for stem, kind in [name.rsplit(".", 1)]
        }
        tensors["bert.embeddings.position_ids"] = torch.arange(model.config.max_position_embeddings)[None]
    if form == "shards":
        names = list(tensors)
        parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
        for file, held in parts.items():
            save_file({name: tensors[name] for name in held}, directory / file)
        places = {name: file for file, held in parts.items() for name in held}
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    elif form == "pickle":
        torch.save(tensors, directory / "pytorch_model.bin")
    else:
        save_file(tensors, directory / "model.safetensors")
    return directory


def test_every_form_of_hugging_faces_directories_is_measured_alike(ours: BertForPreTraining, tmp_path: Path) -> None:
    write_shard(tmp_path / "x_test_0.hdf5", synthetic_rows(ROWS, seq_len=32, max_pred_len=5, seed=0))
    found = []
    for form in ("plain", "old names", "shards", "pickle"):
        model = save_in_form(ours, tmp_path / form, form)
        done = forked("stages.evaluate", model, tmp_path, "--device", "cpu", "--out", tmp_path / f"{form} out")
        assert done.returncode == 0, done.stdout
        found.append(json.loads((tmp_path / f"{form} out" / "evaluation.json").read_text()))
    assert found[0]["samples"] == ROWS
    assert found[1:] == found[:1] * 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"max_position_embeddings": 16}, "seq_len 32 is longer than the model's max_position_embeddings 16"),
        ({"type_vocab_size": 1}, "the model's type_vocab_size is 1, but the shards in"),
    ],
)
def test_rows_that_do_not_fit_the_model_are_one_line(
    ours: BertForPreTraining, tmp_path: Path, change: dict[str, int], said: str
) -> None:
    write_shard(tmp_path / "x_test_0.hdf5", synthetic_rows(3, seq_len=32, max_pred_len=5, seed=0))
    other = BertForPreTraining(dataclasses.replace(ours.config, **change))
    other.initialise(seed=1)
    model = save_in_form(other, tmp_path / "model", "plain")
    done = forked("stages.evaluate", model, tmp_path, "--device", "cpu", "--out", tmp_path / "out")
    assert_one_line_error(done, said)


@pytest.mark.parametrize(("config", "said"), [("[]", "is not a JSON object"), ("{}", "lacks")])
def test_what_is_no_model_is_one_line(ours: BertForPreTraining, tmp_path: Path, config: str, said: str) -> None:
    write_shard(tmp_path / "x_test_0.hdf5", synthetic_rows(3, seq_len=32, max_pred_len=5, seed=0))
    model = save_in_form(ours, tmp_path / "model", "plain")
    if config == "{}":
        tensors = dict(ours.named_parameters())
        del tensors["bert.embeddings.LayerNorm.weight"]
        save_file(tensors, model / "model.safetensors")
    else:
        (model / "config.json").write_text(config)
    done = forked("stages.evaluate", model, tmp_path, "--device", "cpu", "--out", tmp_path / "out")
    assert_one_line_error(done, said)


@torch.no_grad()
def test_a_limit_takes_a_fair_share_of_all_shards(ours: BertForPreTraining, tmp_path: Path) -> None:
    """Three shards of 200 rows, alike except for the label of the pair, which is right only in the first."""
    arrays = synthetic_rows(1, seq_len=32, max_pred_len=5, seed=0)
    length = int(arrays["input_mask"].sum())
    ids, segments = (torch.from_numpy(arrays[n][:, :length].astype(np.int64)) for n in ("input_ids", "segment_ids"))
    guess = int(hugging_faces(ours)(ids, token_type_ids=segments).seq_relationship_logits.argmax())
    many = {name: value.repeat(200, axis=0) for name, value in arrays.items()}
    for shard in range(3):
        many["next_sentence_labels"][:] = guess if shard == 0 else 1 - guess
        write_shard(tmp_path / f"x_test_{shard}.hdf5", many)
    found = measured(ours, tmp_path, tmp_path / "out", max_samples=300)
    assert found["samples"] == 300
    # 300 of 600 rows without repetition, a third of them right: five standard deviations.
    assert found["next_sentence_accuracy"] == pytest.approx(1 / 3, abs=5 * np.sqrt(2 / 9 / 300 * 300 / 599))


@torch.no_grad()
def test_an_mlp_is_measured_as_by_hand(tmp_path: Path) -> None:
    """40 images in batches of 16, the last one smaller; 7 of 10 labels are the best guess, the others the worst."""
    write_images(tmp_path / "images", training=10)
    images, model = Images(tmp_path / "images", HELD_OUT), MLP()
    model.initialise(1)
    x = torch.from_numpy(images.pixels.copy()).float() / 255
    hidden = (x @ model.fc1.weight.T + model.fc1.bias).clamp(min=0)
    hidden = (hidden @ model.fc2.weight.T + model.fc2.bias).clamp(min=0)
    logits = hidden @ model.fc3.weight.T + model.fc3.bias
    is_right = torch.arange(len(images)) % 10 < 7
    labels = torch.where(is_right, logits.argmax(1), logits.argmin(1))
    images.labels = labels.numpy()
    with StageDirectory.begin(tmp_path / "out", lambda: Identity("evaluate_mlp", 1)) as work:
        found = mlp.evaluate(work, model, images, device=CpuDevice(), batch_size=16)
    expected = (logits.logsumexp(1) - logits.gather(1, labels[:, None])[:, 0]).mean().item()
    assert found["loss"] == pytest.approx(expected, rel=1e-5)  # fp32
    assert (found["images"], found["accuracy"]) == (40, 0.7)
