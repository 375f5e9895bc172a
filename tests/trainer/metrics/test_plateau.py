"""The plateau doctor: what it says about trainings with a fault, and that it is silent about healthy ones."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.tasks.summary import phase_line
from stages.report import view_of
from stages.view import facts
from tests.helpers.corpora import make_tokens
from tests.helpers.runs import write_run
from tests.helpers.small_language import VOCAB, Change, Fault, replaced, train_here, write_language
from tests.helpers.support import forked, metrics
from trainer.data.bert_batch import BertBatch
from trainer.metrics import plateau
from trainer.metrics.data_facts import BatchFacts, DataFacts
from trainer.metrics.unigram import UnigramBaseline
from trainer.models.base import Model


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_language(tmp_path_factory.mktemp("language") / "dynamic")


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_language(tmp_path_factory.mktemp("language") / "static", static=True)


@pytest.fixture(scope="module")
def default_start(language: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The initial weights of the embedded default: words' vectors from counts, heads that attend to neighbours."""
    out = tmp_path_factory.mktemp("language") / "embedded"
    done = forked("stages.embed", language, "--hidden-size", 64, "--out", out)
    assert done.returncode == 0, done.stdout
    return {"word_embeddings": out / "embeddings.safetensors", "initial_attention": "neighbours"}


def diagnoses(out: Path) -> list[tuple[int, str]]:
    """(step, cause) of each diagnosis in the records."""
    return [(record["step"], one["cause"]) for record in metrics(out) for one in record.get("diagnoses", ())]


def permuted(batch: BertBatch, number: int) -> BertBatch:
    """As if each batch came from a vocabulary of its own."""
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(number))
    labels = torch.where(batch.masked_labels < 0, batch.masked_labels, order[batch.masked_labels.clamp(min=0)])
    return replaced(batch, input_ids=order[batch.input_ids], masked_labels=labels)


def unknown(batch: BertBatch, number: int) -> BertBatch:
    """As if the vocabulary had few of the text's words: most are [UNK]."""
    ids, labels = (torch.where(values > 40, 1, values) for values in (batch.input_ids, batch.masked_labels))
    return replaced(batch, input_ids=ids, masked_labels=labels)


def shuffled(batch: BertBatch, number: int) -> BertBatch:
    """Each masked token has another one's label."""
    labels, real = batch.masked_labels.clone(), int((batch.masked_labels >= 0).sum())
    labels[:real] = labels[torch.randperm(real, generator=torch.Generator().manual_seed(number))]
    return replaced(batch, masked_labels=labels)


def visible(batch: BertBatch, number: int) -> BertBatch:
    """Nothing is masked."""
    ids, real = batch.input_ids.clone(), batch.masked_labels >= 0
    ids.view(-1)[batch.masked_index[real]] = batch.masked_labels[real]
    return replaced(batch, input_ids=ids)


def without_positions(batch: BertBatch, number: int) -> BertBatch:
    return replaced(batch, position_ids=torch.zeros_like(batch.position_ids))


def freeze_a_layer(model: Model) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith("bert.encoder.layer.0."))


@pytest.mark.parametrize(
    ("cause", "fault"),
    [
        pytest.param("vocabulary", permuted, id="ids permuted"),
        pytest.param("vocabulary", unknown, id="UNK everywhere"),
        pytest.param("labels shuffled", shuffled, id="labels shuffled"),
        pytest.param("labels visible", visible, id="labels visible"),
        pytest.param("positions", without_positions, id="positions missing"),
    ],
)
@pytest.mark.parametrize(
    "is_static", [pytest.param(False, id="dynamic"), pytest.param(True, id="static", marks=pytest.mark.slow)]
)
def test_a_fault_of_the_batches_is_found_within_60_steps(
    language: Path, masked: Path, tmp_path: Path, cause: str, fault: Fault, is_static: bool
) -> None:
    lines = train_here(masked if is_static else language, tmp_path / "out", steps=60, fault=fault)
    found = diagnoses(tmp_path / "out")
    assert [what for _, what in found] == [cause]
    assert sum(line.startswith(f"warning: {cause}: ") for line in lines) == 1
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [(one["step"], one["cause"]) for one in results["diagnoses"]] == found


def identical(arrays: dict[str, np.ndarray]) -> None:
    for values in arrays.values():
        values[:] = values[0]


def cut_short(arrays: dict[str, np.ndarray]) -> None:
    arrays["input_mask"][:, 4:] = 0


@pytest.mark.parametrize(
    ("cause", "change", "is_static"),
    [("duplicates", identical, False), ("duplicates", identical, True), ("attention mask", cut_short, True)],
)  # masks that are drawn when examples are read are always inside the attention mask
def test_a_fault_of_the_shards_is_found_within_60_steps(
    tmp_path: Path, cause: str, change: Change, is_static: bool
) -> None:
    data = write_language(tmp_path / "data", static=is_static, change=change)
    train_here(data, tmp_path / "out", steps=60)
    assert cause in [what for _, what in diagnoses(tmp_path / "out")]


@pytest.mark.parametrize(("copies", "shards", "causes"), [(5, 1, []), (1, 5, ["duplicates"])])
def test_copies_with_other_static_masks_are_no_duplicates_and_those_with_the_same_are(
    tmp_path: Path, copies: int, shards: int, causes: list[str]
) -> None:
    """Whole sentences, which each copy cuts in the same way."""
    tokens, data = make_tokens(tmp_path / "tokens", documents=60), tmp_path / "data"
    words = ("--no-next-sentence", "--masking", "static", "--dupe-factor", copies, "--seq-len", 32, "--max-pred-len", 5)
    done = forked("stages.shard", *words, "--shards", 1, "--tokens", tokens, "--out", data)
    assert done.returncode == 0, done.stdout
    (shard,) = data.glob("*_training_*.hdf5")
    for number in range(1, shards):
        shutil.copy(shard, shard.with_name(f"copy{number}_training_0.hdf5"))
    train_here(data, tmp_path / "out", steps=60, model={"next_sentence": False})
    assert [what for _, what in diagnoses(tmp_path / "out")] == causes


@pytest.mark.parametrize(("optimizer", "lr"), [("AdamW", 1e-3), pytest.param("Muon", 1e-2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("factor", "cause"), [(30, "learning rate too high"), (1 / 300, "learning rate too low")])
def test_a_wrong_learning_rate_is_found_within_200_steps(
    language: Path, tmp_path: Path, optimizer: str, lr: float, factor: float, cause: str
) -> None:
    train_here(language, tmp_path / "out", steps=200, lr=lr * factor, optimizer=optimizer)
    assert [what for _, what in diagnoses(tmp_path / "out")] == [cause]


@pytest.mark.parametrize(
    ("factor", "causes"),
    [
        (30, ["learning rate too high"]),
        (1, []),
        pytest.param(1 / 300, ["learning rate too low"], marks=pytest.mark.slow),
    ],
)
def test_from_the_defaults_start_a_wrong_learning_rate_is_found_too(
    language: Path, default_start: dict[str, Any], tmp_path: Path, factor: float, causes: list[str]
) -> None:
    """There the first loss is about that of the frequencies, so it is never far above the baseline."""
    lines = train_here(language, tmp_path / "out", steps=200, initial=default_start, lr=5e-3 * factor, optimizer="Muon")
    assert [what for _, what in diagnoses(tmp_path / "out")] == causes
    for cause, better in re.findall(r"warning: (.*?): .* try lr = (\S+) instead", "\n".join(lines)):
        assert 5e-4 < float(better) < 2e-2, cause  # 5e-3 is a good one


@pytest.mark.parametrize("optimizer", ["AdamW", "Muon"])
def test_a_frozen_layer_is_found_within_60_steps(language: Path, tmp_path: Path, optimizer: str) -> None:
    """Weight decay still shrinks its weights."""
    lr = {"AdamW": 2e-3, "Muon": 1e-2}[optimizer]
    lines = train_here(
        language, tmp_path / "out", steps=60, prepare=freeze_a_layer, optimizer=optimizer, lr=lr, weight_decay=0.1
    )
    assert [what for _, what in diagnoses(tmp_path / "out")] == ["frozen layer"]
    assert any("bert.encoder.layer.0." in line and "and 4 more" in line for line in lines)


#: In addition to the AdamW defaults of `train_here`.
HEALTHY: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "another seed": {"seed": 7},
    "Muon": {"optimizer": "Muon", "lr": 1e-2},
    "Muon at twice the rate": {"optimizer": "Muon", "lr": 2e-2},
    "a tenth of the rate": {"lr": 2e-4},
    "smaller": {"model": {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64}},
    # The other runs end before a loss at the baseline is a reason to warn.
    "smaller, past the patience": {
        "steps": 700,
        "model": {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64},
    },
    "long warm-up": {"warmup_steps": 150},
    "wsd": {"schedule": "wsd"},
    "cosine, batches of 4": {"schedule": "cosine", "micro_batch_size": 4},
    "micro-batches": {"micro_batch_size": 4, "grad_accum_usteps": 4},
    "30 to 15 % masked": {"rates": (0.3, 0.15)},
    "LAMB": {"optimizer": "LAMB", "lr": 1e-2},
    # Small: at the others' size, a CPU without bf16 took three minutes.
    "bf16": {"precision": "bf16-sr", "model": {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64}},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_gets_no_warning(language: Path, tmp_path: Path, name: str) -> None:
    lines = train_here(language, tmp_path / "out", **HEALTHY[name])
    assert diagnoses(tmp_path / "out") == []
    assert not [line for line in lines if line.startswith("warning")]


def test_healthy_static_masks_and_a_phase_2_that_is_resumed_get_no_warning(masked: Path, tmp_path: Path) -> None:
    """Phase 2 starts from weights that are past the baseline, at a lower rate, and is interrupted."""
    out = tmp_path / "out"
    train_here(masked, out, steps=120, num_ckpts_to_keep=-1)
    phase2 = {"phase": 2, "phase1_end_step": 120, "max_steps": 80, "lr": 1e-4, "resume": True, "num_ckpts_to_keep": -1}
    train_here(masked, out, steps=45, **phase2)
    train_here(masked, out, steps=80, **phase2)
    assert len(metrics(out)) == 200
    assert diagnoses(out) == []


def test_a_loss_that_stays_at_the_baseline_is_told_once_without_a_cause(
    language: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Words drawn independently: there is no context to learn, and the examples look sound."""
    monkeypatch.setattr(plateau, "_PATIENCE_STEPS", 60)
    rng = np.random.default_rng(1)

    def independent(arrays: dict[str, np.ndarray]) -> None:
        words = arrays["input_ids"] >= 5
        arrays["input_ids"][words] = rng.permutation(arrays["input_ids"][words])

    data = write_language(tmp_path / "data", change=independent)
    lines = train_here(data, tmp_path / "out", steps=160)
    (said,) = [line for line in lines if line.startswith("warning")]
    assert re.search(
        r"plateau: after \d+ steps the masked-LM loss is (4.\d\d); always guessing .* gives (4.\d\d)", said
    )
    assert [what for _, what in diagnoses(tmp_path / "out")] == ["plateau"]


class Weights:
    """Matrices that change by a share of their size each time that they are looked at."""

    def __init__(self, change: float) -> None:
        self.change = change

    def measure(self) -> tuple[float, list[str]]:
        return self.change, []


def said_of(losses: Iterable[float], *, change: float, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str, str]]:
    """(step, cause, condition) whenever the doctor says something or changes its mind. 500 words are equally frequent,
    so that the baseline is log 500 = 6.21; the matrices change by `change` in the first 20 steps together."""
    given = list(losses)
    config = SimpleNamespace(lr=1e-3, warmup_steps=10, max_steps=len(given))
    doctor = plateau.Doctor(config, 500, None, are_masked=True)  # type: ignore[arg-type]
    monkeypatch.setattr(doctor, "_movement", Weights(change))
    rng, found, condition = np.random.default_rng(0), [], ""
    for step, loss in enumerate(given, start=1):
        doctor._observed[step - 1] = BatchFacts(rng.integers(0, 500, 200), np.full(200, 4), 0, 31, np.arange(4), step)
        causes = [one.cause for one in doctor.record(step, loss, 1e-3)]
        if causes or doctor.condition != condition:
            condition = doctor.condition
            found.append((step, ",".join(causes), condition))
    return found


def test_a_short_phase_that_ends_at_the_baseline_says_so_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said_of([6.2] * 300, change=0.4, monkeypatch=monkeypatch) == [(300, "plateau", "plateau")]
    assert said_of([6.2] * 150, change=0.4, monkeypatch=monkeypatch) == []  # too short to tell
    assert said_of([6.2] * 200 + [5.9] * 100, change=0.4, monkeypatch=monkeypatch) == []


def test_a_rate_that_was_found_wrong_is_forgotten_when_the_loss_falls_under_the_baseline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    high = "learning rate too high"
    assert said_of([6.5] * 100 + [5.5] * 100, change=20, monkeypatch=monkeypatch) == [(60, high, high), (120, "", "")]


def test_a_rate_is_too_low_if_the_loss_has_not_fallen(monkeypatch: pytest.MonkeyPatch) -> None:
    low = "learning rate too low"
    assert said_of([6.0] * 140, change=1e-3, monkeypatch=monkeypatch) == [(120, low, low)]
    assert said_of([6.0] * 60 + [5.8] * 80, change=1e-3, monkeypatch=monkeypatch) == []
    assert said_of([4.0] * 140, change=1e-3, monkeypatch=monkeypatch) == []  # a model that has learned goes on


def test_rows_that_come_again_in_the_next_epoch_are_no_duplicates() -> None:
    facts_of_data = DataFacts(VOCAB)
    rows, labels = np.arange(100, dtype=np.uint64), np.arange(10, 110)
    for epoch in range(4):
        facts_of_data.add(BatchFacts(labels, np.full(100, 4), 0, 31, rows, epoch))
    assert facts_of_data.faults() == []
    for _ in range(4):
        facts_of_data.add(BatchFacts(labels, np.full(100, 4), 0, 31, rows, 4))
    assert facts_of_data.faults() == []  # 300 of 800 rows
    for _ in range(4):
        facts_of_data.add(BatchFacts(labels, np.full(100, 4), 0, 31, rows, 4))
    assert [cause for cause, _ in facts_of_data.faults()] == ["duplicates"]


def test_the_baseline_is_the_entropy_of_the_labels_from_few_of_them() -> None:
    """8,000 labels of 8,000 words by Zipf's law: the entropy of the observed frequencies is 0.4 nats too low, and still
    0.2 with Miller's correction."""
    p = 1 / np.arange(1, 8001)
    p /= p.sum()
    true = -(p * np.log(p)).sum()
    for seed in range(5):
        labels = np.random.default_rng(seed).choice(8000, 8000, p=p)
        baseline = UnigramBaseline(8000)
        baseline.add(labels)
        seen = baseline.counts[baseline.counts > 0] / 8000
        observed = -(seen * np.log(seen)).sum()
        assert observed + (len(seen) - 1) / 16000 < true - 0.2
        assert abs(baseline.entropy() - true) < 0.1
        assert baseline.of(labels) == pytest.approx(baseline.entropy())


def test_report_and_summary_name_the_warnings(tmp_path: Path) -> None:
    run = write_run(tmp_path / "work", (12, 4))
    metrics_file = run[1] / "metrics.jsonl"
    lines = metrics_file.read_text().splitlines()
    record = json.loads(lines[6]) | {"diagnoses": [{"cause": "labels shuffled", "text": "…"}]}
    metrics_file.write_text("\n".join([*lines[:6], json.dumps(record), *lines[7:]]) + "\n")
    assert ["warnings while training", "labels shuffled (step 7)", "–"] in facts.training_table(view_of(run, None))
    counts = {
        "steps": 12,
        "diagnoses": [{"step": 7, "cause": "labels shuffled", "text": "…"}],
        "throughput_average": 1.0,
    }
    assert phase_line(counts, 1).endswith("sequences/s; warnings: labels shuffled (step 7)")
    assert phase_line({**counts, "diagnoses": []}, 1).endswith("sequences/s")
