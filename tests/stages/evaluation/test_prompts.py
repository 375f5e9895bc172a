"""Suggested prompts: typed as they are shown, they get the answers that are shown."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from common.errors import UserError
from pipeline.commands.try_model import newest_model, suggestions
from pipeline.status.stage_dirs import StageDirs
from pipeline.tasks.summary import print_phase2
from stages.evaluation.prompts import _candidates as prompts_of
from stages.evaluation.prompts import suggest
from stages.predict import load, predict
from stages.tokens.wordpiece import build_tokenizer, save_tokenizer
from stages.view import facts
from tests.helpers.runs import write_stage
from tests.helpers.small_language import train_here
from tests.helpers.support import forked
from trainer.data.shards import write_shard
from trainer.models.config import ModelConfig

transformers = pytest.importorskip("transformers")

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
#: Each sentence has eight words that occur in no other, so that each of them tells the rest.
TOPICS = [
    "the lazy cat drinks fresh milk, not water: every warm morning.",
    "a young sailor paints his old wooden boat in dark green.",
    "our teacher explains how small numbers become large sums!",
    "two brown horses pull heavy stones along that river bank.",
    "why does this engine need clean oil and strong bolts?",
]
S, P = 24, 3


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learned the sentences, and shards with held-out examples of them."""
    directory = tmp_path_factory.mktemp("prompts")
    words = sorted({word for topic in TOPICS for word in re.findall(r"\w+|[^\w\s]", topic)})
    vocabulary = [*SPECIAL, *words, "##s"]
    tokenizer, vocab_size = build_tokenizer(vocabulary, lower_case=True), len(vocabulary)
    for name in ("data", "model"):
        (directory / name).mkdir()
    rng = np.random.default_rng(0)
    for name, rows in (("x_training_0", 1500), ("x_test_0", 40)):
        write_shard(directory / "data" / f"{name}.hdf5", _rows(tokenizer, rows, rng))
    config = ModelConfig(
        vocab_size=vocab_size, num_hidden_layers=2, hidden_size=64, num_attention_heads=2, intermediate_size=128,
        max_position_embeddings=S,
    )  # fmt: skip
    train_here(directory / "data", directory / "run", vocab_size=vocab_size, steps=120)
    save_tokenizer(directory / "model", vocabulary, lower_case=True)
    (directory / "model" / "config.json").write_text(json.dumps(config.to_hugging_face()))
    shutil.copy(
        directory / "run/checkpoints/ckpt_120/model-00-of-01.safetensors", directory / "model/model.safetensors"
    )
    return directory


def _rows(tokenizer: Any, rows: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    ids = np.zeros((rows, S), np.uint16)
    positions, labels = np.zeros((2, rows, P), np.uint16)
    for row in range(rows):
        tokens = tokenizer.encode(TOPICS[int(rng.integers(len(TOPICS)))]).ids
        ids[row, : len(tokens)] = tokens
        chosen = np.sort(rng.choice(np.arange(1, len(tokens) - 1), P, replace=False))
        positions[row], labels[row] = chosen, ids[row, chosen]
        ids[row, chosen] = tokenizer.token_to_id("[MASK]")
    empty = np.zeros((rows, S), np.uint8)
    return {
        "input_ids": ids, "input_mask": (ids > 0).astype(np.uint8), "segment_ids": empty,
        "masked_lm_positions": positions, "masked_lm_ids": labels,
        "next_sentence_labels": rng.integers(0, 2, rows).astype(np.uint8),
    }  # fmt: skip


def evaluated(model: Path, data: Path, out: Path) -> dict[str, Any]:
    done = forked("stages.evaluate", model, data, "--max-pred-len", P, "--device", "cpu", "--out", out)
    assert done.returncode == 0, done.stdout
    counts: dict[str, Any] = json.loads((out / "evaluation.json").read_text())
    return counts


@pytest.fixture(scope="module")
def prompts(trained: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = evaluated(trained / "model", trained / "data", trained / "evaluation")["prompts"]
    return found


def test_a_suggested_prompt_gets_the_answer_that_is_shown(trained: Path, prompts: list[dict[str, Any]]) -> None:
    """From `stages.predict` and from Hugging Face's own pipeline; the answer completes a sentence of the text."""
    model, tokenizer = load(trained / "model", trained / "model")
    masked = transformers.BertForMaskedLM.from_pretrained(trained / "model").eval()
    pipeline = transformers.pipeline("fill-mask", model=masked, tokenizer=tokenizer, device="cpu")
    assert len(prompts) >= 3
    assert len({one["answer"] for one in prompts}) == len(prompts)
    assert [one["probability"] for one in prompts] == sorted((one["probability"] for one in prompts), reverse=True)
    for one in prompts:
        (fillings,) = predict(model, tokenizer, [one["prompt"]]).fillings
        assert fillings[0] == (one["answer"], pytest.approx(one["probability"], abs=1e-4))
        assert pipeline(one["prompt"])[0]["token_str"] == one["answer"]
        known = [tokenizer(topic)["input_ids"] for topic in TOPICS]
        assert tokenizer(one["prompt"].replace("[MASK]", one["answer"]))["input_ids"] in known


def test_the_sample_of_answers_is_fair(trained: Path, prompts: list[dict[str, Any]]) -> None:
    """The model's best answer by Hugging Face's pipeline, next to the word of the text, whether right or not."""
    _, tokenizer = load(trained / "model", trained / "model")
    masked = transformers.BertForMaskedLM.from_pretrained(trained / "model").eval()
    pipeline = transformers.pipeline("fill-mask", model=masked, tokenizer=tokenizer, device="cpu")
    answers = json.loads((trained / "evaluation" / "evaluation.json").read_text())["answers"]
    assert len(answers) == 3
    known = [tokenizer(topic)["input_ids"] for topic in TOPICS]
    for one in answers:
        best = pipeline(one["prompt"])[0]
        assert (best["token_str"], best["score"]) == (one["answer"], pytest.approx(one["probability"], abs=1e-4))
        assert tokenizer(one["prompt"].replace("[MASK]", one["truth"]))["input_ids"] in known


def test_a_prompt_is_spelled_so_that_it_is_read_as_the_same_tokens() -> None:
    """Pieces are joined; words of the vocabulary that would be split differently when typed are left out."""
    vocabulary = [*SPECIAL, "the", "run", "##ning", "cat", "sees", "it", "running", "x", "7", ".", "_", ","]
    tokenizer = build_tokenizer(vocabulary, lower_case=True)
    ids = {piece: number for number, piece in enumerate(vocabulary)}

    def prompts(text: str) -> list[str]:
        row = [ids[piece] for piece in text.split()]
        return [one.text for one in prompts_of(tokenizer, iter([row]), {ids["the"]})]

    assert prompts("[CLS] the cat sees it x x . [SEP]") == ["the cat [MASK] it x x.", "the cat sees it [MASK] x."]
    assert prompts("[CLS] the cat sees the run ##ning x . [SEP]") == []  # "running" is a piece of its own
    assert prompts("[CLS] the [UNK] sees it x x . [SEP]") == []
    assert prompts("[CLS] the cat , sees 7 x . [SEP]") == ["the cat, [MASK] 7 x.", "the cat, sees 7 [MASK]."]
    assert prompts("[CLS] the cat _ sees it x . [SEP]") == []  # code, not prose


def test_ids_that_the_tokenizer_lacks_end_sentences_and_are_no_answers() -> None:
    """A model may have more ids than its tokenizer: shards of a larger vocabulary were downloaded."""
    vocabulary = [*SPECIAL, "the", "cat", "sees", "it", "x", "."]
    ids, beyond = {piece: number for number, piece in enumerate(vocabulary)}, len(vocabulary) + 30
    tokenizer = build_tokenizer(vocabulary, lower_case=True)
    sentence = [ids[piece] for piece in ("the", "cat", "sees", "it", "x", "x", ".")]
    row = np.array([ids["[CLS]"], beyond, *sentence, *sentence[:3], beyond, *sentence[3:], ids["[SEP]"]])[None]
    zeros = np.zeros((1, 1), np.int64)
    arrays = {
        "input_ids": row, "input_mask": np.ones_like(row), "masked_lm_positions": zeros, "masked_lm_ids": zeros,
    }  # fmt: skip
    logits = torch.zeros(50, beyond + 1)
    logits[:, ids["sees"]], logits[:, beyond] = 4.0, 5.0
    config = SimpleNamespace(max_position_embeddings=S, vocab_size=beyond + 1)
    model: Any = SimpleNamespace(config=config, logits=lambda batch: (logits, None), eval=lambda: None)
    model.to = lambda device: model
    reader: Any = SimpleNamespace(read=lambda samples: arrays)
    device: Any = SimpleNamespace(torch_device=torch.device("cpu"), put=lambda batch: batch)
    samples: Any = np.zeros(1)
    frequencies = np.zeros(beyond + 1, np.int64)
    frequencies[len(vocabulary) :] = 1  # no word of the sentence is frequent
    found = suggest(model, tokenizer, reader, samples, frequencies, device)
    probability = round(float(logits.softmax(-1)[0, ids["sees"]]), 6)
    assert [one["answer"] for one in found["answers"]] == ["sees", "sees"]
    assert found["prompts"] == [{"prompt": "the cat [MASK] it x x.", "answer": "sees", "probability": probability}]


def test_the_most_frequent_words_are_no_answers(trained: Path, prompts: list[dict[str, Any]], tmp_path: Path) -> None:
    """Answers that become the most frequent words of the training shards are no longer suggested."""
    import h5py

    shutil.copytree(trained / "data", tmp_path / "data")
    answers = sorted(one["answer"] for one in prompts)
    _, tokenizer = load(trained / "model", trained / "model")
    ids = tokenizer.convert_tokens_to_ids(answers)
    with h5py.File(tmp_path / "data" / "x_training_0.hdf5", "r+") as file:
        rows = file["input_ids"][:]
        rows[1:1001, 1:-1] = np.array(ids)[np.arange(1000 * (S - 2)) % len(ids)].reshape(1000, S - 2)
        file["input_ids"][:] = rows
    found = evaluated(trained / "model", tmp_path / "data", tmp_path / "evaluation")["prompts"]
    assert found
    assert not {one["answer"] for one in found} & set(answers)


def test_a_model_without_a_tokenizer_or_context_has_none(trained: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    (tmp_path / "model").mkdir()
    tensors = load_file(trained / "model" / "model.safetensors")
    zeros = {name: np.zeros_like(tensor) if "encoder" in name else tensor for name, tensor in tensors.items()}
    save_file(zeros, tmp_path / "model" / "model.safetensors")
    shutil.copy(trained / "model" / "config.json", tmp_path / "model")
    assert "prompts" not in evaluated(tmp_path / "model", trained / "data", tmp_path / "without")
    shutil.copy(trained / "model" / "tokenizer.json", tmp_path / "model")
    assert evaluated(tmp_path / "model", trained / "data", tmp_path / "with")["prompts"] == []


def work_directory(directory: Path, counts: dict[str, Any]) -> StageDirs:
    """A merged model, and an evaluation of it with these counts."""
    model = write_stage(directory, "merge_shards", counts={}, parameters={})
    evaluation = write_stage(directory, "evaluate", counts=counts, parameters={})
    record = json.loads((evaluation / "manifest.json").read_text())
    record["upstream"] = {"merge_shards": json.loads((model / "manifest.json").read_text())["fingerprint"]}
    (evaluation / "manifest.json").write_text(json.dumps(record))
    return StageDirs(directory)


PROMPT: dict[str, Any] = {"prompt": "it's a [MASK] day.", "answer": "sunny", "probability": 0.4123}


def test_try_without_a_text_shows_them_ready_to_be_pasted(tmp_path: Path) -> None:
    stage_dirs = work_directory(tmp_path, {"prompts": [PROMPT]})
    _, command, answer = suggestions(stage_dirs, newest_model(stage_dirs))
    assert shlex.split(command) == ["python", "-m", "pipeline", "try", "it's a [MASK] day."]
    assert answer.split() == ["41.23%", "sunny"]


def test_try_says_that_only_frequencies_are_learned(tmp_path: Path) -> None:
    stage_dirs = work_directory(tmp_path / "none", {"prompts": []})
    (line,) = suggestions(stage_dirs, newest_model(stage_dirs))
    assert "little more than word frequencies" in line
    stage_dirs = work_directory(tmp_path / "before", {})
    with pytest.raises(UserError, match="has no prompts .* give a text"):
        suggestions(stage_dirs, newest_model(stage_dirs))


def test_the_summary_has_the_accuracy_by_frequency_and_the_bits_that_were_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    evaluated = {
        "samples": 9, "masked_lm_accuracy": 0.2, "masked_lm_loss": 5.0, "unigram_loss": 6.0, "unigram_accuracy": 0.1,
        "masked_lm_accuracy_frequent": 0.412, "masked_lm_accuracy_common": None, "masked_lm_accuracy_rare": 0.05,
    }  # fmt: skip
    for bits, end in ((None, ""), (1.931, "; 1.93 bits per character")):
        print_phase2([], {**evaluated, "bits_per_character": bits}, Path("model"), Path("page"))
        lines = "".join(capsys.readouterr()).splitlines()
        said = f"accuracy 41.2% on the 100 most frequent pieces, 5.0% on the rest{end}"
        assert [line.strip() for line in lines].count(said) == 1
    print_phase2([], {"samples": 0}, Path("model"), Path("page"))
    assert "accuracy" not in "".join(capsys.readouterr())


def test_summary_and_card_show_them(capsys: pytest.CaptureFixture[str]) -> None:
    evaluated = {
        "samples": 9, "masked_lm_accuracy": 0.2, "masked_lm_loss": 5.0, "unigram_loss": 6.0, "unigram_accuracy": 0.1,
        "next_sentence_accuracy": 0.5,
    }  # fmt: skip
    for prompts, expected in (
        ([PROMPT], """try 'it'"'"'s a [MASK] day.' (sunny: 41%)"""),
        ([], "little more than word frequencies was learned"),
        (None, 'try "The answer is [MASK]."'),
    ):
        found = {} if prompts is None else {"prompts": prompts}
        print_phase2([], {**evaluated, **found}, Path("model"), Path("page"))
        assert expected in "".join(capsys.readouterr())
    answers = [{**PROMPT, "truth": truth} for truth in ("sunny", "rainy")]
    print_phase2([], {**evaluated, "prompts": [PROMPT], "answers": answers}, Path("model"), Path("page"))
    said = "".join(capsys.readouterr())
    assert said.count(PROMPT["prompt"]) == 2
    assert "sunny (41%; right)" in said
    assert "sunny (41%; the text has: rainy)" in said
    assert facts.prompts_table({"prompts": [PROMPT]}) == [["it's a [MASK] day.", "sunny", "41.2%"]]
