"""What the doctor says about time and disk space, compared with the files and manifests of a chain that has run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, BertForMaskedLM, BertForPreTraining

from pipeline.commands.doctor.estimates import parameter_count
from tests.helpers import web
from tests.helpers.chain import STAGES, Chain, finished_chain
from tests.helpers.images import write_images
from trainer.models.config import ModelConfig


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return finished_chain(tmp_path_factory)


def estimated(chain: Chain, *words: str) -> dict[str, dict[str, Any]]:
    """The estimates by stage."""
    said = json.loads(chain.ask("doctor", "--json", *words).stdout)
    return {stage["stage"]: stage for stage in said["stages"]}


def bytes_in(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def test_of_a_complete_chain_nothing_is_to_be_made(chain: Chain) -> None:
    assert estimated(chain) == {}
    assert "nothing to make" in chain.ask("doctor").stdout


def test_nothing_is_known_where_nothing_ran(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    found = estimated(chain)
    assert set(found) == set(STAGES)
    assert {stage["seconds"] for stage in found.values()} == {None}
    assert "unknown" in chain.ask("doctor").stdout


def test_a_longer_training_takes_as_many_times_as_long(chain: Chain) -> None:
    """80 steps instead of 8, at the recorded rate; disk space for the checkpoints kept and the one being written."""
    found = estimated(chain, "--Phase1-max-steps", "80")
    counts = json.loads((chain.latest("pretrain-phase1") / "manifest.json").read_text())["counts"]
    training = found["pretrain-phase1"]
    assert training["seconds"] == pytest.approx(10 * 60 * counts["train_time_minutes"])
    newest = bytes_in(chain.latest("pretrain-phase1") / counts["checkpoint"])
    assert training["bytes"] == 3 * newest
    assert chain.latest("pretrain-phase1").name in training["source"]
    assert "tokenize_corpus" not in found, "it is complete"


def test_a_bigger_batch_takes_longer_and_a_budget_as_long_as_it_says(chain: Chain) -> None:
    one = estimated(chain, "--Phase1-lr", "1e-4")["pretrain-phase1"]
    two = estimated(chain, "--Phase1-lr", "1e-4", "--Phase1-global-batch-size", "32")["pretrain-phase1"]
    assert two["seconds"] == pytest.approx(2 * one["seconds"])
    assert estimated(chain, "--Phase1-budget", "8h")["pretrain-phase1"]["seconds"] == 8 * 3600


def test_another_model_is_not_known_but_its_size_is(chain: Chain) -> None:
    """12 bytes per parameter in each of three checkpoints: fp32 weights and two moments."""
    training = estimated(chain, "--Model-hidden-size", "64")["pretrain-phase1"]
    vocabulary = json.loads((chain.latest("tokenize_corpus") / "manifest.json").read_text())["counts"]["vocab_size"]
    config = BertConfig(vocab_size=vocabulary, num_hidden_layers=1, hidden_size=64, num_attention_heads=2,
                        intermediate_size=64, max_position_embeddings=64)  # fmt: skip
    assert training["seconds"] is None
    assert training["bytes"] == 3 * 12 * BertForPreTraining(config).num_parameters()


def test_more_text_takes_in_proportion(chain: Chain, tmp_path: Path) -> None:
    """Three times the text: tokens and shards take three times their bytes and seconds."""
    copy = chain.copy(tmp_path / "copy")
    text = (copy.directory / "corpus.txt").read_text()
    (copy.directory / "corpus.txt").write_text("\n\n".join([text] * 3))
    size = (copy.directory / "corpus.txt").stat().st_size / len(text.encode())
    found = estimated(copy)
    for stage in ("tokenize_corpus", "shard_dataset-phase1", "shard_dataset-phase2"):
        manifest = json.loads((copy.latest(stage) / "manifest.json").read_text())
        made = sum(output["bytes"] for output in manifest["outputs"])
        assert found[stage]["bytes"] == pytest.approx(size * made, rel=1e-3), stage
        assert found[stage]["seconds"] is not None


def test_an_interrupted_training_is_known_by_its_own_steps(chain: Chain, tmp_path: Path) -> None:
    """What remains after its newest checkpoint, at the mean rate that its metrics record."""
    copy = chain.copy(tmp_path / "copy")
    training = copy.latest("pretrain-phase1")
    (training / "manifest.json").unlink()
    records = [json.loads(line) for line in (training / "metrics.jsonl").read_text().splitlines()]
    found = estimated(copy, "--phase", "1", "Pretrain")["pretrain-phase1"]
    assert found["seconds"] == 0
    assert found["source"].startswith("based on its own last steps: ")
    rate = len(records) / sum(record["step_time_s"] for record in records)
    assert f"{rate:.4g} steps/s, 0 steps to go" in found["source"]


def test_the_mlp_is_known_by_its_epochs(tmp_path: Path) -> None:
    """Twice as many take twice as long."""
    chain = Chain(tmp_path)
    images = write_images(tmp_path / "images", training=640)
    words = ("--Mnist-url", str(images), "--Mnist-checksums", "none", "--Mnist-log-interval", "10")
    assert set(estimated(chain, "MnistMlp", *words)) == {"download_mnist", "train_mlp", "evaluate_mlp"}
    chain.run("MnistMlp", *words, "--Mnist-epochs", "1")
    found = estimated(chain, "MnistMlp", *words, "--Mnist-epochs", "4")
    assert set(found) == {"train_mlp", "evaluate_mlp"}
    assert found["train_mlp"]["seconds"] is not None
    assert f"based on {chain.latest('train_mlp').name}" in found["train_mlp"]["source"]
    longer = estimated(chain, "MnistMlp", *words, "--Mnist-epochs", "8")
    assert longer["train_mlp"]["seconds"] == pytest.approx(2 * found["train_mlp"]["seconds"])


@pytest.mark.parametrize(("size", "cls"), [("tiny", BertForPreTraining), ("large", BertForMaskedLM)])
def test_the_number_of_parameters_is_hugging_faces(size: str, cls: Any) -> None:
    model = ModelConfig.preset(size, next_sentence=cls is BertForPreTraining)
    config = BertConfig(**{name: value for name, value in vars(model).items() if name != "next_sentence"})
    import torch

    with torch.device("meta"):
        assert parameter_count(model) == cls(config).num_parameters()


@pytest.mark.slow
def test_a_short_run_makes_everything_known_and_leaves_nothing(tmp_path: Path) -> None:
    """No tracker hears of it either."""
    chain = Chain(tmp_path)
    with web.serving(b"page") as server:
        address = server.url.rpartition("/")[0]
        found = estimated(chain, "--measure", "--Trackers-names", "mlflow", "--Trackers-mlflow-uri", address)
        assert not [path for path in server.paths if "mlflow" in path]
    assert set(found) == set(STAGES)
    assert None not in {stage["seconds"] for stage in found.values()}
    assert {path.name for path in tmp_path.iterdir()} <= {"corpus.txt", "test.cfg", "work"}
    assert not chain.work.exists() or not chain.directories()
