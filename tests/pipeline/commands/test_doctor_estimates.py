"""What the doctor says about time and disk space, compared with the files and manifests of a chain that has run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from transformers import BertConfig, BertForMaskedLM, BertForPreTraining

from pipeline.commands.doctor import measure
from pipeline.commands.doctor.finding import Plan
from pipeline.commands.doctor.sizes import parameter_count
from tests.conftest import Disk
from tests.helpers import web
from tests.helpers.chain import STAGES, Chain, finished_chain
from tests.helpers.images import write_images
from tests.helpers.ready import pack, write
from tests.helpers.support import command
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


def test_a_training_on_another_device_says_nothing_about_this_one(chain: Chain) -> None:
    """Whether this machine has a GPU is another finding."""
    words = ("doctor", "--json", "--Phase1-lr", "1e-4", "--Cluster-device")
    for device, is_known in (("cpu", True), ("cuda", False)):
        done = command("-m", "pipeline", *words, device, env={"LUIGI_CONFIG_PATH": str(chain.config)})
        (training,) = (one for one in json.loads(done.stdout)["stages"] if one["stage"] == "pretrain-phase1")
        assert (training["seconds"] is not None) == is_known
    assert chain.manifest("pretrain-phase1")["counts"]["device"] == "cpu"  # type: ignore[index]


def test_a_budget_that_is_half_used_takes_the_rest(chain: Chain, tmp_path: Path) -> None:
    """A directory as such a training leaves it: eight of 108 steps are done, at the rate in its metrics."""
    copy = chain.copy(tmp_path / "copy")
    copy.config.write_text(copy.config.read_text().replace("[phase1]\n", "[phase1]\nbudget = 8h\n"))
    program = "import pipeline; from pipeline.tasks.bert import Pretrain; print(Pretrain(phase=1).directory)"
    directory = Path(command("-c", program, env={"LUIGI_CONFIG_PATH": str(copy.config)}).stdout.strip())
    copy.latest("pretrain-phase1").rename(directory)
    for name in ("manifest.json", "stage.json"):
        (directory / name).unlink()
    record = {"budget_s": 8 * 3600, "max_steps": 108, "training": {}}
    (directory / "budget.json").write_text(json.dumps({"1": record}))
    step_s = [json.loads(line)["step_time_s"] for line in (directory / "metrics.jsonl").read_text().splitlines()]
    found = estimated(copy, "--phase", "1", "Pretrain")["pretrain-phase1"]
    assert found["seconds"] == pytest.approx(100 * sum(step_s) / len(step_s))
    assert "100 steps to go" in found["source"]


def test_checkpoints_that_are_all_kept_are_as_many_as_intervals_fit(chain: Chain) -> None:
    """By time, in the estimated time; where that is not known, neither is their number."""
    words = ("--Phase1-max-steps", "800", "--Phase1-num-ckpts-to-keep=-1", "--Phase1-ckpt-interval-minutes", "0.001")
    counts: Any = chain.manifest("pretrain-phase1")["counts"]
    newest = bytes_in(chain.latest("pretrain-phase1") / counts["checkpoint"])
    by_time = estimated(chain, *words, "--Phase1-ckpt-interval-steps", "0")["pretrain-phase1"]
    assert by_time["bytes"] == newest * (3 + int(by_time["seconds"] / 0.06))
    by_steps = estimated(chain, *words, "--Phase1-ckpt-interval-minutes", "0", "--Phase1-ckpt-interval-steps", "100")
    assert by_steps["pretrain-phase1"]["bytes"] == newest * (2 + 8)
    unknown = estimated(chain, *words, "--Model-hidden-size", "64")["pretrain-phase1"]
    assert (unknown["seconds"], unknown["bytes"]) == (None, None)


@pytest.mark.parametrize("where", ["counts", "counts.train_time_minutes", "counts.steps", "parameters"])
@pytest.mark.parametrize("value", ["x", [], None, 10**400, 0], ids=["text", "list", "null", "huge", "0"])
def test_what_a_damaged_record_would_tell_is_not_known(chain: Chain, tmp_path: Path, where: str, value: Any) -> None:
    copy = chain.copy(tmp_path / "copy")
    path = copy.latest("pretrain-phase1") / "manifest.json"
    record = inner = json.loads(path.read_text())
    *outer, last = where.split(".")
    for name in outer:
        inner = inner[name]
    inner[last] = value
    path.write_text(json.dumps(record))
    assert estimated(copy, "--Phase1-lr", "1e-4")["pretrain-phase1"]["seconds"] is None


ONE_DOWNLOAD = ("DownloadDataset", "--phase", "1", "--Dataset-phase2-url", "/nowhere", "--Dataset-phase1-url")


def test_a_download_needs_what_the_download_itself_asks_for(tmp_path: Path, disk: Disk) -> None:
    """Compared with its refusal on a full disk."""
    chain = Chain(tmp_path)
    disk.resize(1 << 10)
    for name in ("/shards.tar", "/shards.tar.gz", "/shards.tar.zst"):
        with web.serving(bytes(2 << 20), name) as server:
            found = estimated(chain, *ONE_DOWNLOAD, server.url)["download_dataset-phase1"]
            refused = chain.run(*ONE_DOWNLOAD, server.url, "--Run-work-dir", str(disk.path / "work"), status=30).stderr
        said = re.search(r"\(([\d,]+) bytes still to fetch, ([\d,]+) of contents", refused)
        assert said is not None, refused
        assert found["bytes"] == sum(int(number.replace(",", "")) for number in said.groups())


def test_a_download_takes_in_proportion_to_its_archive_and_a_local_one_needs_no_copy(tmp_path: Path) -> None:
    chain, folder = Chain(tmp_path), tmp_path / "shards"
    for name in ("training", "test"):
        write(folder / f"x_{name}_0.hdf5", rows=2000, S=32, P=5)
    packed = pack(folder, "gz")
    archive = packed.read_bytes()
    assert bytes_in(folder) > 5 * len(archive), "the rate per byte of contents would be another"
    with web.serving(archive, "/shards.tar.gz") as server:
        chain.run(*ONE_DOWNLOAD, server.url)
    took: Any = chain.manifest("download_dataset-phase1")["seconds"]
    with web.serving(bytes(3 * len(archive)), "/other.tar.gz") as server:
        assert estimated(chain, *ONE_DOWNLOAD, server.url)["download_dataset-phase1"]["seconds"] == pytest.approx(
            3 * took
        )
    for place, wanted in ((folder, bytes_in(folder)), (packed, 4 * len(archive))):
        local = estimated(chain, *ONE_DOWNLOAD, str(place))["download_dataset-phase1"]
        assert (local["seconds"], local["bytes"]) == (None, wanted)


def sampled(tmp_path: Path, *sources: Path) -> str | None:
    """The text of the short run; None: the built-in one."""
    corpus = SimpleNamespace(source=" ".join(map(str, sources)))
    plan = SimpleNamespace(settings=SimpleNamespace(corpus=corpus), stages=list)
    source = measure._text(cast(Plan, plan), tmp_path)["corpus"]["source"]
    return None if source == "builtin" else Path(source).read_text()


def test_a_short_run_reads_small_files_together(tmp_path: Path) -> None:
    """Up to 4 MiB; what is not plain, or has too few documents to hold two out, is replaced."""
    texts = []
    for number in range(4):
        texts.append(tmp_path / f"{number}.txt")
        texts[-1].write_text(f"text {number} of a document.\n" * 10)
    assert sampled(tmp_path, *texts) == "".join(path.read_text() + "\n\n" for path in texts)
    assert sampled(tmp_path, *texts[:3]) is None
    (tmp_path / "table.parquet").touch()
    assert sampled(tmp_path, *texts, tmp_path / "table.parquet") is None
    texts[1].write_text("A line.\n\n" * (1 << 20))
    assert len(sampled(tmp_path, *texts) or "") == (4 << 20) + len("\n\n")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["as it is", "a document per file", "two machines"])
def test_a_short_run_makes_everything_known_and_leaves_nothing(tmp_path: Path, case: str) -> None:
    """No tracker hears of it either. How fast two machines train together is not seen on one."""
    chain, words, unknown = Chain(tmp_path), list[str](), set[str]()
    if case == "a document per file":
        texts = (tmp_path / "corpus.txt").read_text().split("\n\n")
        (tmp_path / "corpus.txt").unlink()
        (tmp_path / "texts").mkdir()
        for number, text in enumerate(texts):
            (tmp_path / "texts" / f"{number}.txt").write_text(text)
        words = ["--Corpus-source", f"{tmp_path}/texts/*.txt", "--Corpus-document", "file"]
    if case == "two machines":
        words = ["--Cluster-nnodes", "2", "--Cluster-master-addr", "127.0.0.1"]
        unknown = {f"{stage}-phase{phase}" for stage in ("precompile", "pretrain") for phase in (1, 2)}
    with web.serving(b"page") as server:
        address = server.url.rpartition("/")[0]
        trackers = ("--Trackers-names", "mlflow", "--Trackers-mlflow-uri", address)
        found = estimated(chain, "--measure", *trackers, *words)
        assert not [path for path in server.paths if "mlflow" in path]
    assert set(found) == set(STAGES)
    assert {name for name, stage in found.items() if stage["seconds"] is None} == unknown
    assert {path.name for path in tmp_path.iterdir()} <= {"corpus.txt", "texts", "test.cfg", "work"}
    assert not chain.work.exists() or not chain.directories()
