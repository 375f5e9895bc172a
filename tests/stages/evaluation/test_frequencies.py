"""Word frequencies, and what is measured with them, are what plain counting gives."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from common.errors import UserError
from common.hashing import InputHashes
from stages.directory.manifest import Identity, StageDirectory
from stages.evaluate import EvaluateOptions
from stages.evaluation.bert import evaluate
from stages.evaluation.frequencies import characters, count_pieces, frequency_scores
from stages.examples import sampled_rows
from stages.examples.sampled_rows import evenly_spaced
from tests.helpers.support import MODEL, VOCAB, synthetic_rows
from trainer.data.file_names import HELD_OUT_SHARDS
from trainer.data.shards import LENGTHS_KEY, MASKED_KEYS, ShardSet, write_shard
from trainer.devices.cpu import CpuDevice
from trainer.models.bert import BertForPreTraining
from trainer.models.config import ModelConfig

Arrays = dict[str, np.ndarray]


def masked_rows(rows: int, *, seed: int) -> tuple[Arrays, list[list[int]]]:
    """Masked examples, and the ids of their text before masking. The replacements do not count."""
    arrays = synthetic_rows(rows, seq_len=32, max_pred_len=5, seed=seed)
    texts = []
    for row in range(rows):
        text = arrays["input_ids"][row, : arrays["input_mask"][row].sum()].tolist()
        for position, label in zip(arrays["masked_lm_positions"][row], arrays["masked_lm_ids"][row], strict=True):
            if position:
                text[int(position)] = int(label)
        texts.append(text)
    return arrays, texts


def words_of(texts: list[list[int]]) -> Counter[int]:
    """2 and 3 are [CLS] and [SEP] in `synthetic_rows`."""
    return Counter(piece for text in texts for piece in text if piece not in (2, 3))


def counted(directory: Path, pattern: str = "*_training_*.hdf5") -> Counter[int]:
    shards = ShardSet.open(directory, pattern)
    with StageDirectory.begin(directory / "out", lambda: Identity("evaluate", 1)) as work:
        counts = count_pieces(work, shards, VOCAB)
    return Counter({piece: int(count) for piece, count in enumerate(counts) if count})


@pytest.mark.parametrize("form", ["masked", "masked when read", "of another tool"])
def test_pieces_count_as_what_they_were(tmp_path: Path, form: str) -> None:
    texts = []
    for shard in range(3):
        arrays, original = masked_rows(17, seed=shard)
        texts += original
        path = tmp_path / f"x_training_{shard}.hdf5"
        if form == "of another tool":
            with h5py.File(path, "w") as file:
                for key, value in arrays.items():
                    file.create_dataset(key, data=value.astype(np.int32), compression="gzip")
            continue
        if form == "masked when read":
            for row, text in enumerate(original):
                arrays["input_ids"][row, : len(text)] = text
            arrays = {key: value for key, value in arrays.items() if key not in MASKED_KEYS}
        write_shard(path, arrays)
    assert counted(tmp_path) == words_of(texts)


def test_packed_rows_count_like_rows_of_their_own(tmp_path: Path) -> None:
    texts = [[2, 9, 9, 7, 3, 8, 3], [2, 5, 3, 6, 3]]
    ids, lengths = np.zeros((1, 16), np.uint16), np.zeros((1, 4), np.uint16)
    ids[0, :12], lengths[0, :2] = sum(texts, []), [7, 5]
    arrays = {
        "input_ids": ids, "input_mask": (ids > 0).astype(np.uint8), "segment_ids": np.zeros((1, 16), np.uint8),
        "next_sentence_labels": np.zeros((1, 4), np.uint8), LENGTHS_KEY: lengths,
    }  # fmt: skip
    write_shard(tmp_path / "x_training_0.hdf5", arrays)
    assert counted(tmp_path) == {9: 2, 7: 1, 8: 1, 5: 1, 6: 1}


def test_of_much_data_a_fair_share_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 rows in all, of 4 of 12 files: files 0, 3, 6 and 9, rows 0 and 5 of each."""
    texts = {}
    for shard in range(12):
        arrays, texts[shard] = masked_rows(10, seed=shard)
        write_shard(tmp_path / f"x_training_{shard:02}.hdf5", arrays)
    monkeypatch.setattr(sampled_rows, "_SHARDS_MAX", 4)
    monkeypatch.setattr(sampled_rows, "_ROWS_MAX", 8)
    assert counted(tmp_path) == words_of([texts[shard][row] for shard in (0, 3, 6, 9) for row in (0, 5)])
    assert evenly_spaced(3, 16) == [0, 1, 2]
    assert evenly_spaced(0, 16) == []


def test_the_baseline_is_computed_as_by_hand() -> None:
    """Four pieces, counted 3, 0, 6 and 0 times: with one more each, 4, 1, 7 and 1 of 13."""
    counts = np.array([3, 0, 6, 0])
    masked, right = np.array([2, 1, 5, 0]), np.array([1, 0, 4, 0])
    found = frequency_scores(counts, masked, right)
    assert found["unigram_loss"] == pytest.approx(-(2 * math.log(4 / 13) + math.log(1 / 13) + 5 * math.log(7 / 13)) / 8)
    assert (found["unigram_accuracy"], found["unigram_tokens"]) == (5 / 8, 9)
    assert (found["masked_tokens_frequent"], found["masked_lm_accuracy_frequent"]) == (8, 5 / 8)
    assert (found["masked_tokens_rare"], found["masked_lm_accuracy_rare"]) == (0, None)


def test_classes_are_by_rank_in_frequency() -> None:
    """2,000 pieces, each more frequent than the one before, except two that tie: the smaller id ranks first."""
    counts = np.arange(2000)
    counts[1899] = counts[1900]
    masked = np.ones(2000, np.int64)
    right = np.zeros(2000, np.int64)
    right[1900:] = 1  # all of the hundred most frequent, but for the tie
    found = frequency_scores(counts, masked, right)
    assert [found[f"masked_tokens_{name}"] for name in ("frequent", "common", "rare")] == [100, 900, 1000]
    assert found["masked_lm_accuracy_frequent"] == 99 / 100
    assert found["masked_lm_accuracy_common"] == 1 / 900
    assert found["masked_lm_accuracy_rare"] == 0


def test_characters_are_those_of_the_words() -> None:
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "##ing", "ü"]
    assert characters(pieces, np.array([0, 3, 0, 0, 0, 2, 5, 1])) == 3 * 1 + 2 * 3 + 5 * 3 + 1
    assert characters(pieces, np.array([0, 0, 0, 0, 0, 1, 0, 0, 0])) == 3
    assert characters(pieces, np.array([0, 0, 0, 0, 0, 1, 0, 0, 4])) is None


def test_an_evaluation_reports_them(tmp_path: Path) -> None:
    """Frequencies from the training shards, tokens and characters from the held-out one."""
    model = BertForPreTraining(ModelConfig(**MODEL))
    model.initialise(seed=1)
    training, training_texts = masked_rows(40, seed=1)
    held_out, _ = masked_rows(20, seed=2)
    write_shard(tmp_path / "x_training_0.hdf5", training)
    write_shard(tmp_path / "x_test_0.hdf5", held_out)
    pieces = [f"piece{number}" if number % 3 else f"##{number}" for number in range(VOCAB)]
    with StageDirectory.begin(tmp_path / "out", lambda: Identity("evaluate", 1)) as work:
        found = evaluate(
            work, model, ShardSet.open(tmp_path, HELD_OUT_SHARDS), training=ShardSet.open(tmp_path), pieces=pieces,
            device=CpuDevice(), batch_size=4, max_samples=10_000,
        )  # fmt: skip
    words = words_of(training_texts)
    is_masked = held_out["masked_lm_positions"] > 0
    labels = held_out["masked_lm_ids"][is_masked].tolist()
    total = sum(words.values())
    loss = -np.mean([math.log((words[label] + 1) / (total + VOCAB)) for label in labels])
    best = min(words, key=lambda piece: (-words[piece], piece))
    assert found["unigram_loss"] == pytest.approx(loss)
    assert found["unigram_accuracy"] == labels.count(best) / len(labels)
    assert (found["unigram_tokens"], found["unigram_from_training"]) == (total, True)
    length = sum(len(pieces[label].removeprefix("##")) for label in labels)
    nats = found["masked_lm_loss"] * found["masked_tokens"]
    assert found["bits_per_character"] == pytest.approx(nats / math.log(2) / length)
    classes = ("frequent", "common")
    assert sum(found[f"masked_tokens_{name}"] for name in classes) == len(labels)
    right = sum(found[f"masked_tokens_{name}"] * found[f"masked_lm_accuracy_{name}"] for name in classes)
    assert right / len(labels) == pytest.approx(found["masked_lm_accuracy"])


@torch.no_grad()
def test_accuracy_by_frequency_is_that_of_each_class(tmp_path: Path) -> None:
    """Each label is the word that the model predicts there, or the one that it deems least likely."""
    from trainer.data.order import Samples
    from trainer.data.reader import BatchReader

    model = BertForPreTraining(ModelConfig(**{**MODEL, "initializer_range": 0.3}))
    model.initialise(seed=1)
    arrays, _ = masked_rows(30, seed=0)
    write_shard(tmp_path / "x_test_0.hdf5", arrays)
    shards = ShardSet.open(tmp_path, HELD_OUT_SHARDS)
    rows = np.arange(30)
    (batch,), _ = BatchReader(shards, vocab_size=VOCAB).micro_batches(Samples(0 * rows, rows), 30)
    logits, _ = model.eval().logits(batch)
    is_masked = arrays["masked_lm_positions"] > 0
    count = int(is_masked.sum())
    is_right = np.arange(count) % 3 > 0
    labels = np.where(is_right, logits[:count].argmax(-1), logits[:count].argmin(-1))
    arrays["masked_lm_ids"][is_masked] = labels
    (tmp_path / "x_test_0.hdf5").unlink()
    write_shard(tmp_path / "x_test_0.hdf5", arrays)
    with StageDirectory.begin(tmp_path / "out", lambda: Identity("evaluate", 1)) as work:
        shards = ShardSet.open(tmp_path, HELD_OUT_SHARDS)
        found = evaluate(work, model, shards, device=CpuDevice(), batch_size=7, max_samples=10_000)
        counts = count_pieces(work, shards, VOCAB)
    frequent = np.isin(labels, sorted(range(VOCAB), key=lambda piece: (-counts[piece], piece))[:100])
    for name, chosen in (("frequent", frequent), ("common", ~frequent)):
        assert found[f"masked_tokens_{name}"] == chosen.sum()
        assert found[f"masked_lm_accuracy_{name}"] == pytest.approx(is_right[chosen].mean())
    assert (found["unigram_from_training"], found["bits_per_character"]) == (False, None)


def test_what_is_read_identifies_the_result(tmp_path: Path) -> None:
    """The held-out shards, the training shards that are counted, and the vocabulary."""
    model, data = tmp_path / "model", tmp_path / "data"
    for path in (
        model / "config.json",
        model / "model.safetensors",
        data / "x_test_0.hdf5",
        data / "x_training_0.hdf5",
    ):
        path.parent.mkdir(exist_ok=True)
        path.write_text(path.name)

    def fingerprint() -> str:
        return EvaluateOptions(model=model, data=data).identity(InputHashes()).fingerprint

    seen = {fingerprint()}
    for path in (data / "x_test_0.hdf5", data / "x_training_0.hdf5", data / "vocab.txt", model / "vocab.txt"):
        path.write_text(f"{path} has changed")
        assert fingerprint() not in seen
        seen.add(fingerprint())


def test_an_id_outside_of_the_vocabulary_is_named(tmp_path: Path) -> None:
    arrays, _ = masked_rows(5, seed=0)
    arrays["input_ids"][3, 1] = VOCAB
    write_shard(tmp_path / "x_training_0.hdf5", arrays)
    with pytest.raises(UserError, match=r"x_training_0.hdf5: input_ids of row 3 holds id 200"):
        counted(tmp_path)
