"""Evaluation counts what Hugging Face's model and numpy get right, on models that are right more often than not."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.images import write_idx, write_images
from tests.support import MODEL, VOCAB, forked, synthetic_rows, tensors, train
from trainer.data.shards import write_shard


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved Hugging Face model whose guesses are certain, and differ from place to place."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(4)
    made = transformers.BertForPreTraining(transformers.BertConfig(**MODEL)).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.3)
    directory = tmp_path_factory.mktemp("model")
    made.save_pretrained(directory)
    return directory


def test_accuracies_and_losses_are_hugging_faces(model: Path, tmp_path: Path) -> None:
    """Two thirds of the labels are what the model thinks most likely, a sixth what it thinks least likely."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.BertForPreTraining.from_pretrained(model).eval()
    rows = synthetic_rows(90, seq_len=32, max_pred_len=5, seed=7)
    ids, mask, segments = (
        torch.from_numpy(rows[k].astype(np.int64)) for k in ("input_ids", "input_mask", "segment_ids")
    )
    with torch.inference_mode():
        out = theirs(input_ids=ids, attention_mask=mask, token_type_ids=segments)
    row, slot = np.nonzero(rows["masked_lm_positions"])
    words = out.prediction_logits[
        torch.from_numpy(row), torch.from_numpy(rows["masked_lm_positions"][row, slot].astype(np.int64))
    ]
    pairs = out.seq_relationship_logits
    rng = np.random.default_rng(8)

    def labels_of(logits: torch.Tensor, classes: int) -> np.ndarray:
        best, worst = logits.argmax(1).numpy(), logits.argmin(1).numpy()
        assert len(np.unique(best)) >= min(classes, 10)
        draw = rng.random(len(best))
        return np.where(draw < 2 / 3, best, np.where(draw < 5 / 6, worst, rng.integers(0, classes, len(best))))

    word_labels, pair_labels = labels_of(words, VOCAB), labels_of(pairs, 2)
    word_labels[word_labels == 0] = 1  # 0 stands for no label
    rows["masked_lm_ids"][row, slot] = word_labels
    rows["next_sentence_labels"] = pair_labels.astype(np.uint8)
    (tmp_path / "data").mkdir()
    write_shard(tmp_path / "data" / "held_out_test_0.hdf5", rows)

    done = forked("stages.evaluate", model, tmp_path / "data", "--out", tmp_path / "out", "--max-pred-len", 5,
                  "--batch-size", 16, "--device", "cpu")  # fmt: skip
    assert done.returncode == 0, done.stdout
    found = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert (found["samples"], found["masked_tokens"]) == (90, len(row))
    right = {
        "masked_lm": words.argmax(1).numpy() == word_labels,
        "next_sentence": pairs.argmax(1).numpy() == pair_labels,
    }
    for name, is_right in right.items():
        assert 0.55 < is_right.mean() < 0.85
        assert found[f"{name}_accuracy"] == pytest.approx(is_right.mean(), rel=1e-12), name
    for name, logits, labels in (("masked_lm", words, word_labels), ("next_sentence", pairs, pair_labels)):
        loss = torch.nn.functional.cross_entropy(logits.double(), torch.from_numpy(labels.astype(np.int64)))
        assert found[f"{name}_loss"] == pytest.approx(loss.item(), rel=1e-4)  # fp32, other kernels


def test_the_mlps_accuracy_is_numpys(tmp_path: Path) -> None:
    data = write_images(tmp_path / "data", training=300, held_out=150)
    path = data / "t10k-labels-idx1-ubyte.gz"
    labels = np.frombuffer(gzip.decompress(path.read_bytes())[8:], np.uint8).copy()
    labels[100:] = (labels[100:] + 1) % 10  # a third are wrong: the model learns these images by heart
    write_idx(path, labels)
    done = train(data_dir=data, output_dir=tmp_path / "run", workload="mnist", device="cpu", batch_size=8, epochs=3)
    assert done.returncode == 0, done.stdout
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("ckpt_*")
    done = forked("stages.evaluate_mlp", checkpoint, data, "--out", tmp_path / "out", "--device", "cpu")
    assert done.returncode == 0, done.stdout
    found = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    images = np.frombuffer(gzip.decompress((data / "t10k-images-idx3-ubyte.gz").read_bytes())[16:], np.uint8)
    weights = {name: value.astype(np.float64) for name, value in tensors(checkpoint).items()}
    x = images.reshape(150, 784) / 255
    for layer in (1, 2, 3):
        x = x @ weights[f"fc{layer}.weight"].T + weights[f"fc{layer}.bias"]
        x = np.maximum(x, 0) if layer < 3 else x
    accuracy = (x.argmax(1) == labels).mean()
    assert 0.3 < accuracy < 1
    assert found["accuracy"] == pytest.approx(accuracy, rel=1e-12)
    x -= x.max(1, keepdims=True)
    loss = (np.log(np.exp(x).sum(1)) - x[np.arange(150), labels]).mean()
    assert found["loss"] == pytest.approx(loss, rel=1e-4)  # fp32
    assert found["images"] == 150
