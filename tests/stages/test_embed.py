"""Initial word embeddings are what plain counting and numpy's SVD give, and what training starts from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import UserError
from stages.examples.cooccurrence import WINDOW, Cooccurrences, positive_pmi, word_vectors
from tests.helpers.support import ROOT, VOCAB, synthetic_rows
from trainer.data.shards import MASKED_KEYS, ShardSet, write_shard
from trainer.models.bert import OUTPUT_BIAS, WORD_EMBEDDINGS, BertForPreTraining
from trainer.models.config import ModelConfig
from trainer.parallel.tensor import TensorParallel
from trainer.workloads.bert import BertWorkload

PIECES = 40
#: synthetic_rows' [CLS] and [SEP].
CLS, SEP = 2, 3


def random_text(rows: int, length: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids with a skewed distribution, and which of them are text: all but those below 4."""
    ids = np.minimum(np.random.default_rng(seed).geometric(0.08, (rows, length)), PIECES - 1).astype(np.int64)
    return ids, ids > SEP


def counted_plainly(ids: np.ndarray, is_text: np.ndarray) -> np.ndarray:
    """Σ 1/distance over all pairs with nothing but text between them, (PIECES, PIECES)."""
    found = np.zeros((PIECES, PIECES))
    for row, text in zip(ids, is_text, strict=True):
        for i in range(len(row)):
            for j in range(i + 1, min(i + WINDOW, len(row) - 1) + 1):
                if text[i : j + 1].all():
                    found[row[i], row[j]] += 1 / (j - i)
                    found[row[j], row[i]] += 1 / (j - i)
    return found


def counts_of(*texts: tuple[np.ndarray, np.ndarray]) -> torch.Tensor:
    counter = Cooccurrences(1 << 20)
    for ids, is_text in texts:
        counter.add(ids, is_text)
    return counter.matrix(PIECES)


def test_pairs_are_counted_as_by_hand() -> None:
    texts = [random_text(7, 30, seed) for seed in range(3)]
    expected = sum(counted_plainly(*text) for text in texts)
    assert (expected == 0).any()
    assert (expected[CLS] == 0).all()
    np.testing.assert_allclose(counts_of(*texts).to_dense().numpy(), expected, rtol=1e-12)


def test_information_is_that_of_its_formula() -> None:
    counts = counted_plainly(*random_text(50, 30, 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        words = counts.sum(1) / counts.sum()
        contexts = counts.sum(0) ** 0.75 / (counts.sum(0) ** 0.75).sum()
        expected = np.log(counts / counts.sum() / np.outer(words, contexts))
    expected = np.where(np.isfinite(expected), np.maximum(expected, 0), 0)
    found = positive_pmi(counts_of(random_text(50, 30, 1))).to_dense().numpy()
    assert 0.05 < (found > 0).mean() < 0.9
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_vectors_are_the_left_singular_vectors_times_the_roots_of_the_singular_values() -> None:
    information = positive_pmi(counts_of(random_text(200, 30, 2)))
    U, S, _ = np.linalg.svd(information.to_dense().double().numpy())
    expected = U[:, :6] * np.sqrt(S[:6])
    seen = information.to_dense().any(1).numpy()
    expected[seen] /= np.linalg.norm(expected[seen], axis=1, keepdims=True)
    found = word_vectors(information, 6, seed=1).numpy()
    assert (found[~seen] == 0).all()
    assert (~seen).sum() >= 4
    # Signs are arbitrary, but the angles between the vectors are not. fp32, three power iterations.
    np.testing.assert_allclose(found @ found.T, (expected * seen[:, None]) @ expected.T, atol=1e-3)
    assert torch.equal(word_vectors(information, 6, seed=1), word_vectors(information, 6, seed=1))


def test_more_elements_than_directions_are_no_error() -> None:
    vectors = word_vectors(positive_pmi(counts_of(random_text(20, 30, 3))), 64, seed=1)
    assert vectors.shape[1] <= PIECES
    assert torch.isfinite(vectors).all()


def stage(data: Path, out: Path, hidden_size: int = 8) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "stages.embed", str(data), f"--hidden-size={hidden_size}", f"--out={out}")
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of random pieces in which 50 and 51, and 60 and 61, are used alike: each pair among its own words."""
    directory = tmp_path_factory.mktemp("shards")
    rng = np.random.default_rng(0)
    arrays = synthetic_rows(400, seq_len=32, max_pred_len=5, seed=1)
    arrays = {key: value for key, value in arrays.items() if key not in MASKED_KEYS}
    text = np.where(rng.random((400, 1)) < 0.5, rng.integers(10, 30, (400, 32)), rng.integers(30, 50, (400, 32)))
    first = text[:, :1] < 30
    special = rng.random((400, 32)) < 0.1
    text = np.where(special, np.where(first, rng.integers(50, 52, (400, 32)), rng.integers(60, 62, (400, 32))), text)
    is_text = (arrays["input_mask"] == 1) & (arrays["input_ids"] > SEP)
    arrays["input_ids"] = np.where(is_text, text, arrays["input_ids"]).astype(arrays["input_ids"].dtype)
    write_shard(directory / "x_training_0.hdf5", arrays)
    # Held-out text, of which nothing is counted.
    arrays["input_ids"] = np.where(is_text, 70, arrays["input_ids"]).astype(arrays["input_ids"].dtype)
    write_shard(directory / "x_test_0.hdf5", arrays)
    return directory


@pytest.fixture(scope="module")
def made(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("embedded") / "out"
    done = stage(shards, out)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("44 words embedded, from "), done.stdout
    return out / "embeddings.safetensors"


@pytest.mark.slow
def test_the_stage_embeds_words_that_are_used_alike_alike(shards: Path, made: Path) -> None:
    found = load_file(made)
    vectors, bias = found[WORD_EMBEDDINGS].numpy(), found[OUTPUT_BIAS].numpy()
    cosine = vectors @ vectors.T / (0.02**2 * 8)
    same = (cosine[10:30, 10:30].mean() + cosine[30:50, 30:50].mean()) / 2
    assert same > 0.3 > 0.1 > abs(cosine[10:30, 30:50].mean())
    assert cosine[50, 51] + cosine[60, 61] - 2 * cosine[50, 60] > 0.5, cosine[50:62, 50:62]
    np.testing.assert_allclose(np.diag(cosine)[50:52], 1, rtol=1e-5)
    assert not vectors[:10].any()
    assert not vectors[52:60].any()
    rows = ShardSet.open(shards).read(0, np.arange(400))
    words = rows["input_ids"][(rows["input_mask"] == 1) & (rows["input_ids"] > SEP)]
    counts = np.bincount(words, minlength=len(bias))
    np.testing.assert_allclose(bias, np.log((counts + 1) / (counts.sum() + len(counts))), rtol=1e-5)
    again = stage(shards, made.parent)
    assert (again.returncode, again.stderr) == (0, "complete already; nothing to do\n")


def initialised(shards: Path, file: Path | None, ranks: TensorParallel | None = None) -> dict[str, torch.Tensor]:
    config = ModelConfig(VOCAB, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    workload = BertWorkload(config, ShardSet.open(shards), word_embeddings=file)
    model = BertForPreTraining(config, ranks=ranks) if ranks else BertForPreTraining(config)
    workload.initialise(model, 5)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_a_training_starts_from_them(shards: Path, made: Path) -> None:
    """Words that the text lacks, and all other parameters, begin as they do without the embeddings, but for one factor:
    all embeddings are twice as large. LayerNorm makes their sum the same again, the logits are not."""
    plain, given, file = initialised(shards, None), initialised(shards, made), load_file(made)
    n = len(file[OUTPUT_BIAS])
    is_given = file[WORD_EMBEDDINGS].any(dim=1)
    assert n < VOCAB
    assert 20 < is_given.sum() < n
    words = given[WORD_EMBEDDINGS]
    assert torch.equal(words[:n][is_given], 2 * file[WORD_EMBEDDINGS][is_given])
    assert torch.equal(words[:n][~is_given], 2 * plain[WORD_EMBEDDINGS][:n][~is_given])
    assert torch.equal(words[n:], 2 * plain[WORD_EMBEDDINGS][n:])
    assert torch.equal(given[OUTPUT_BIAS][:n], file[OUTPUT_BIAS])
    assert torch.equal(given[OUTPUT_BIAS][n:], file[OUTPUT_BIAS].min().expand(VOCAB - n))
    assert given[OUTPUT_BIAS].exp().sum() < 1.1  # probabilities: ids that the text lacks have almost none
    for name in plain.keys() - {WORD_EMBEDDINGS, OUTPUT_BIAS}:
        assert torch.equal(given[name], plain[name] * (2 if name.endswith("_embeddings.weight") else 1)), name
    halves = [initialised(shards, made, TensorParallel(rank, 2)) for rank in range(2)]
    for name in (WORD_EMBEDDINGS, OUTPUT_BIAS):
        assert torch.equal(torch.cat([half[name] for half in halves])[:VOCAB], given[name])


def test_embeddings_of_another_model_are_refused(shards: Path, made: Path, tmp_path: Path) -> None:
    narrow = tmp_path / "narrow.safetensors"
    save_file({WORD_EMBEDDINGS: torch.zeros(9, 4), OUTPUT_BIAS: torch.zeros(9)}, narrow)
    with pytest.raises(UserError, match=rf"embeddings.weight is \[9, 4\]; allowed: up to \[{VOCAB}, 8\]"):
        initialised(shards, narrow)
    for content, said in ((b"no tensors", "header"), (None, "No such file")):
        broken = tmp_path / "broken.safetensors"
        broken.unlink(missing_ok=True)
        if content is not None:
            broken.write_bytes(content)
        with pytest.raises(UserError, match=rf"{said}.*; give the file that stages.embed makes"):
            initialised(shards, broken)
    save_file({WORD_EMBEDDINGS: torch.zeros(9, 8)}, narrow)
    with pytest.raises(UserError, match=rf"bias is missing; allowed: up to \[{VOCAB}\]"):
        initialised(shards, narrow)
    for value in (float("nan"), float("inf")):
        save_file({WORD_EMBEDDINGS: torch.zeros(9, 8), OUTPUT_BIAS: torch.tensor([0.0] * 8 + [value])}, narrow)
        with pytest.raises(UserError, match="bias has values that are not finite"):
            initialised(shards, narrow)


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    for data, said in ((tmp_path / "no", "there is no directory"), (tmp_path, "matches *_training_*.hdf5")):
        done = stage(data, tmp_path / "out")
        assert done.returncode == 1
        assert done.stderr.startswith("error: ")
        assert said in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert not os.path.exists(tmp_path / "out" / "manifest.json")
