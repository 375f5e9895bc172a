"""BLiMP: decisions are those of a plain loop over Hugging Face's model, and a bad copy is refused in one line."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from common.errors import UserError
from common.hashing import InputHashes
from stages.directory.manifest import Identity, StageDirectory
from stages.evaluate import EvaluateOptions, evaluate_model
from stages.evaluation import blimp
from stages.evaluation.bert import load_model
from stages.evaluation.blimp import Blimp, load_tokenizer, pseudo_log_likelihoods, read_pairs
from stages.tokens.wordpiece import save_tokenizer
from tests.helpers.support import MODEL, assert_one_line_error, forked
from trainer.data.vocabulary import MASK, SPECIAL_TOKENS, read_vocabulary
from trainer.devices.base import Device
from trainer.devices.cpu import CpuDevice
from trainer.models.bert import BertForPreTraining
from trainer.models.config import ModelConfig

WORDS = [
    *("the", "a", "cat", "cats", "dog", "dogs", "sleep", "##s", "run", "##ning"),
    *("is", "are", "that", "which", "often", "very", ".", ",", "?"),
]
PAIRS = {
    "agreement": [
        ("The cat sleeps.", "The cat sleep."),
        ("The dogs that run often sleep.", "The dogs that run often sleeps."),
        ("Cats sleep.", "Cats sleeps."),
        ("A very, very big dog is running.", "A very, very big dog are running."),  # "big" is unknown
        ("Dogs are cats.", "dogs are cats ."),  # the same tokens: a tie
    ],
    "order": [("Which cat runs?", "Cat which runs?"), ("Is a dog a cat?", "A is dog a cat?")],
}


class PaddingDevice(CpuDevice):
    """A CPU that requests static shapes, as devices that compile do."""

    compiles_shapes = True


def write_model(directory: Path, vocabulary: list[str], **changes: Any) -> Path:
    """A model with random weights, large enough that probabilities differ, and its tokenizer."""
    config = {**MODEL, "vocab_size": len(vocabulary) + 3, "initializer_range": 0.4, **changes}
    model = BertForPreTraining(ModelConfig(**config))
    model.initialise(seed=1)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(model.config.to_hugging_face()))
    save_file(dict(model.named_parameters()), directory / "model.safetensors")
    save_tokenizer(directory, vocabulary, lower_case=True)
    return directory


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", [*SPECIAL_TOKENS, *WORDS])


def write_archive(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def lines(pairs: list[tuple[str, str]]) -> bytes:
    records = [{"sentence_good": good, "sentence_bad": bad, "UID": "x"} for good, bad in pairs]
    return "".join(json.dumps(record) + "\n" for record in records).encode()


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    files = {f"data/{name}.jsonl": lines(pairs) for name, pairs in PAIRS.items()}
    return write_archive(tmp_path / "blimp.tar.gz", {"data/README": b"", "data/._x.jsonl": b"\0", **files})


@torch.no_grad()
def plain_decisions(directory: Path, pairs: dict[str, list[tuple[str, str]]]) -> dict[str, list[bool]]:
    """Decisions made sentence by sentence, token by token, with Hugging Face's model and tokenizer."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.BertForMaskedLM.from_pretrained(directory).eval()
    tokenizer = transformers.BertTokenizerFast.from_pretrained(directory)

    def score(sentence: str) -> float:
        ids = tokenizer(sentence, return_tensors="pt")["input_ids"]
        total = 0.0
        for place in range(1, ids.shape[1] - 1):
            masked = ids.clone()
            masked[0, place] = tokenizer.mask_token_id
            total += theirs(masked).logits[0, place].log_softmax(-1)[ids[0, place]].item()
        return total

    return {name: [score(good) > score(bad) for good, bad in found] for name, found in pairs.items()}


def our_decisions(
    directory: Path, pairs: dict[str, list[tuple[str, str]]], out: Path, device: Device | None = None
) -> dict[str, list[bool]]:
    device = device or CpuDevice()
    model = load_model(directory, device)
    with StageDirectory.begin(out, lambda: Identity("evaluate", 1)) as work:
        scorer = Blimp(pairs, load_tokenizer(directory, model.config.vocab_size))
        return {name: found.tolist() for name, found in scorer.correct(work, model, device).items()}


@pytest.mark.parametrize(
    ("device", "next_sentence"), [(CpuDevice(), True), (PaddingDevice(), True), (CpuDevice(), False)]
)
def test_decisions_are_those_of_a_plain_loop(tmp_path: Path, device: Device, next_sentence: bool) -> None:
    """On random pairs of sentences of many lengths, about half of which are decided correctly."""
    model = write_model(tmp_path / "model", [*SPECIAL_TOKENS, *WORDS], next_sentence=next_sentence)
    rng = np.random.default_rng(0)
    words = [word.removeprefix("##") for word in WORDS]
    sentences = [" ".join(rng.choice(words, size=rng.integers(1, 24))) for _ in range(80)]
    pairs = {**PAIRS, "random": list(zip(sentences[::2], sentences[1::2], strict=True))}
    found = our_decisions(model, pairs, tmp_path / "out", device)
    assert found == plain_decisions(model, pairs)
    assert found["agreement"][-1] is False
    assert 5 < sum(found["random"]) < 35


def test_scores_are_those_of_a_plain_loop(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The score of each sentence, in batches that end anywhere, with and without padding."""
    ours = load_model(model, CpuDevice()).double()
    vocabulary = read_vocabulary(model / "vocab.txt")
    rng = np.random.default_rng(0)
    sentences = [(2, *rng.integers(5, 20, length).tolist(), 3) for length in (3, 1, 7, 3, 12, 7, 6)]
    expected = []
    transformers = pytest.importorskip("transformers")
    theirs = transformers.BertForMaskedLM.from_pretrained(model).double().eval()
    for ids in sentences:
        whole = torch.tensor(ids)[None].repeat(len(ids) - 2, 1)
        places = torch.arange(1, len(ids) - 1)
        masked = whole.scatter(1, places[:, None], vocabulary.index(MASK))
        with torch.no_grad():
            logits = theirs(masked).logits.log_softmax(-1)
        expected.append(sum(logits[place - 1, place, ids[place]].item() for place in places))
    monkeypatch.setattr(blimp, "_TOKENS_AT_ONCE", 40)
    for number, device in enumerate((CpuDevice(), PaddingDevice())):
        with StageDirectory.begin(tmp_path / f"out{number}", lambda: Identity("evaluate", 1)) as work:
            found = pseudo_log_likelihoods(work, ours, sentences, vocabulary.index(MASK), device)
        np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.slow
def test_decisions_on_real_pairs_are_those_of_a_plain_loop(shared: Path, tmp_path: Path) -> None:
    """Two pairs from each of BLiMP's sets, in the vocabulary of the original BERT."""
    copy, vocabulary = shared / "data" / "blimp.tar.gz", shared / "data" / "vocab" / "bert-uncased.txt"
    if not (copy.exists() and vocabulary.exists()):
        pytest.skip(f"{copy} or {vocabulary} is not here")
    pairs = read_pairs(copy, 2)
    assert len(pairs) == 67
    directory = write_model(tmp_path / "model", read_vocabulary(vocabulary))
    found = our_decisions(directory, pairs, tmp_path / "out")
    assert found == plain_decisions(directory, pairs)
    assert 25 < sum(map(sum, found.values())) < 109


def test_an_archive_and_a_folder_are_read_alike(archive: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, pairs in PAIRS.items():
        (folder / f"{name}.jsonl").write_bytes(lines(pairs))
    (folder / "._agreement.jsonl").write_bytes(b"\0")
    assert read_pairs(archive, 0) == read_pairs(folder, 0) == PAIRS
    assert read_pairs(archive, 2) == {name: pairs[:2] for name, pairs in PAIRS.items()}


def test_the_archive_of_its_repository_is_a_copy(tmp_path: Path) -> None:
    """In which the results of other models are *.jsonl, too."""
    files = {f"blimp-master/data/{name}.jsonl": lines(pairs) for name, pairs in PAIRS.items()}
    results = {"blimp-master/raw_results/summary/models_summary.jsonl": b'{"UID": "x", "ngram": 0.439}\n'}
    assert read_pairs(write_archive(tmp_path / "blimp.tar.gz", results | files), 0) == PAIRS


def evaluation(model: Path, data: Path, out: Path, *words: object) -> Any:
    data.mkdir(exist_ok=True)
    return forked("stages.evaluate", model, data, "--out", out, "--device", "cpu", *words)


def test_the_command_reports_each_set(model: Path, archive: Path, tmp_path: Path) -> None:
    """Even without held-out examples."""
    done = evaluation(model, tmp_path / "data", tmp_path / "out", "--blimp", archive)
    assert done.returncode == 0, done.stdout
    counts = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert f"BLiMP: {counts['blimp_accuracy']:.1%} of 7 pairs (chance: 50%)" in done.stdout
    decisions = plain_decisions(model, PAIRS)
    right = {name: sum(found) for name, found in decisions.items()}
    assert counts == {
        "samples": 0,
        "blimp_pairs": 7,
        "blimp_accuracy": pytest.approx(sum(right.values()) / 7),
        "blimp_accuracy_by_set": {name: pytest.approx(right[name] / len(PAIRS[name])) for name in sorted(PAIRS)},
    }


def test_its_content_and_the_limit_identify_the_result(model: Path, archive: Path, tmp_path: Path) -> None:
    def fingerprint(**options: Any) -> str:
        return EvaluateOptions(model=model, data=tmp_path, **options).identity(InputHashes()).fingerprint

    scored, copy = fingerprint(blimp=archive), tmp_path / "copy.tar.gz"
    copy.write_bytes(archive.read_bytes())
    assert fingerprint(blimp=copy) == scored
    write_archive(copy, {"agreement.jsonl": lines(PAIRS["agreement"])})
    assert len({scored, fingerprint(blimp=copy), fingerprint(), fingerprint(blimp=archive, blimp_samples=2)}) == 4
    assert fingerprint(blimp_samples=2) == fingerprint()
    (model / "tokenizer.json").write_text("{}")
    assert fingerprint(blimp=archive) != scored


GOOD = b'{"sentence_good": "A cat.", "sentence_bad": "Cat a."}\n'


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "x.jsonl is empty"),
        (b"\n \n", "x.jsonl is empty"),
        (GOOD + b'{"sentence_good": "A cat."}', "line 2 of x.jsonl lacks sentence_good or sentence_bad"),
        (b'{"sentence_good": "A cat.", "sentence_bad": " "}', "line 1 of x.jsonl lacks"),
        (b'{"sentence_good": "A cat.", "sentence_bad": 5}', "line 1 of x.jsonl lacks"),
        (b"[1, 2]", "line 1 of x.jsonl lacks"),
        (GOOD + b"\n{", "line 3 of x.jsonl is not JSON"),
        (b'{"sentence_good": "\xff", "sentence_bad": "x"}', "line 1 of x.jsonl is not JSON"),
        (b'{"sentence_good": "\\ud800", "sentence_bad": "x"}', "line 1 of x.jsonl is not JSON"),
        (b"[" * 100_000, "line 1 of x.jsonl is not JSON"),
    ],
)
def test_a_bad_set_is_refused_in_one_line(tmp_path: Path, content: bytes, said: str) -> None:
    archive = write_archive(tmp_path / "blimp.tar.gz", {"x.jsonl": content})
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x.jsonl").write_bytes(content)
    for copy in (archive, tmp_path / "folder"):
        with pytest.raises(UserError) as error:
            read_pairs(copy, 0)
        assert said in str(error.value)
        assert "\n" not in str(error.value)


def test_too_much_is_refused_before_all_of_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blimp, "_BYTES_MAX", len(GOOD))
    archive = write_archive(tmp_path / "blimp.tar.gz", {"x.jsonl": GOOD, "y.jsonl": GOOD})
    with pytest.raises(UserError, match="holds more than 54 bytes"):
        read_pairs(archive, 0)


def test_what_is_no_copy_is_refused_in_one_line(model: Path, archive: Path, tmp_path: Path) -> None:
    def refused(copy: Path, *parts: str, of: Path = model) -> None:
        assert_one_line_error(evaluation(of, tmp_path / "data", tmp_path / "out", "--blimp", copy), *parts)

    (tmp_path / "text.jsonl").write_bytes(GOOD)
    refused(tmp_path / "text.jsonl", "is not a tar archive")
    (tmp_path / "cut.tar.gz").write_bytes(archive.read_bytes()[:-20])
    refused(tmp_path / "cut.tar.gz", "cut.tar.gz")
    refused(write_archive(tmp_path / "none.tar.gz", {"x.csv": GOOD}), "holds no *.jsonl")
    refused(tmp_path / "gone.tar.gz", "cannot read", "gone.tar.gz")
    long = write_archive(tmp_path / "long.tar.gz", {"x.jsonl": lines([("cat " * 70, "dog")])})
    refused(long, "72 tokens", "64")
    (model / "tokenizer.json").write_text("{}")
    refused(archive, "tokenizer.json is not a tokenizer")
    (model / "tokenizer.json").unlink()
    refused(archive, "has no tokenizer.json", "--vocab-file", "or leave --blimp out")
    large = write_model(tmp_path / "large", [*SPECIAL_TOKENS, *WORDS], vocab_size=20)
    refused(archive, "24 pieces, the model 20", of=large)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_copy_that_is_not_the_one_the_stage_was_claimed_with_is_refused(
    model: Path, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Luigi hashes it when it starts, and the model is evaluated days later."""
    options = EvaluateOptions(model=model, data=tmp_path, blimp=archive, device="cpu")

    def change(*_: object) -> SimpleNamespace:
        write_archive(archive, {"agreement.jsonl": lines(PAIRS["agreement"])})
        return SimpleNamespace(scores=lambda *_: {})

    with StageDirectory.begin(tmp_path / "out", options.identity) as work:
        if when == "before":
            change()
        else:
            monkeypatch.setattr("stages.evaluate._blimp", change)
        with pytest.raises(UserError, match=f"{archive.name} was changed while it was in use"):
            evaluate_model(work, options)
    assert not (tmp_path / "out" / "evaluation.json").exists()
