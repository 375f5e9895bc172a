"""A stage has one identity: what luigi expects in a directory is what the stage's command writes when run by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.chain import Chain, finished_chain
from tests.helpers.images import write_images
from tests.helpers.ready import write
from tests.helpers.support import command

#: Prints, for each stage of a goal that has a command in `stages`, what luigi expects and the words that start it.
_EXPECTED = """
import json, sys, pipeline
from pipeline.status.chain import chain
from pipeline.tasks.bert import BertPhase2
from pipeline.tasks.dataset import DownloadDataset
from pipeline.tasks.mnist import MnistMlp
from pipeline.tasks.training import Training
stages = [task for goal in sys.argv[1:] for task in chain(eval(goal)) if not isinstance(task, Training)]
expected = {
    task.label: {
        "directory": str(task.directory), "fingerprint": task.identity.fingerprint, "record": task.identity.record(),
        "words": list(map(str, task.command())),
    }
    for task in stages
}
json.dump(expected, sys.stdout)
"""


def expected(chain: Chain, *goals: str) -> dict[str, dict[str, Any]]:
    done = command("-c", _EXPECTED, *goals, env={"LUIGI_CONFIG_PATH": str(chain.config)})
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


def by_hand(stage: dict[str, Any], out: Path) -> dict[str, Any]:
    """The manifest that luigi's words leave in another directory, where no identity was written before."""
    directory = stage["directory"]
    words = [{directory: str(out), f"--out={directory}": f"--out={out}"}.get(word, word) for word in stage["words"]]
    assert words != stage["words"]
    done = command(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    manifest: dict[str, Any] = json.loads((out / "manifest.json").read_text())
    return manifest


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Chain, dict[str, dict[str, Any]]]:
    chain = finished_chain(tmp_path_factory).copy(tmp_path_factory.mktemp("one") / "chain")
    return chain, expected(chain, "BertPhase2()")


@pytest.mark.parametrize(
    "label",
    ["tokenize_corpus", "shard_dataset-phase1", "shard_dataset-phase2", "convert_checkpoint", "merge_shards",
     "evaluate", "report"],
)  # fmt: skip
def test_a_stage_started_by_hand_has_luigis_fingerprint(
    bert: tuple[Chain, dict[str, dict[str, Any]]], label: str, tmp_path: Path
) -> None:
    stage = bert[1][label]
    assert by_hand(stage, tmp_path / "out")["fingerprint"] == stage["fingerprint"]


def test_asking_for_a_command_writes_nothing(bert: tuple[Chain, dict[str, dict[str, Any]]]) -> None:
    """Not even a training's, which may begin with a checkpoint of another, or a model's config."""
    chain, _ = bert

    def seen() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in chain.work.glob("*/**/*")}

    before = seen()
    asks = (
        "import pipeline.tasks.bert, pipeline.status.chain\n"
        "for one in pipeline.status.chain.chain(pipeline.tasks.bert.BertPhase2()): one.command()"
    )
    done = command("-c", asks, env={"LUIGI_CONFIG_PATH": str(chain.config)})
    assert done.returncode == 0, done.stderr
    assert seen() == before


@pytest.mark.parametrize("phase", [1, 2])
def test_graphs_precompiled_by_hand_have_luigis_parameters(
    bert: tuple[Chain, dict[str, dict[str, Any]]], phase: int, tmp_path: Path
) -> None:
    """Except for the model: luigi names the preset before there is a vocabulary; the command reads its config.json."""
    stage = bert[1][f"precompile-phase{phase}"]
    made, wanted = by_hand(stage, tmp_path / "out"), stage["record"]
    assert made["parameters"].keys() == wanted["parameters"].keys()
    differing = {key for key, value in wanted["parameters"].items() if made["parameters"][key] != value}
    assert differing == {"model"}
    assert (made["stage"], made["format_version"], made["phase"]) == ("precompile", 3, phase)


def test_the_mlps_stages_and_downloads_started_by_hand_have_luigis_fingerprints(tmp_path: Path) -> None:
    images = write_images(tmp_path / "images", training=80)
    write(tmp_path / "shards/x_training_0.hdf5", S=32)
    chain = Chain(tmp_path, f"[mnist]\nurl = {images}\nchecksums = none\nepochs = 1\nbatch_size = 8\n")
    shards = f"[dataset]\nphase1_url = {tmp_path}/shards\nphase2_url = {tmp_path}/shards\n"
    chain.config.write_text(chain.config.read_text().replace("[dataset]\n", shards))
    chain.run("MnistMlp")
    stages = expected(chain, "DownloadDataset(phase=1)", "MnistMlp()")
    assert set(stages) == {"download_dataset-phase1", "download_mnist", "evaluate_mlp"}
    for label, stage in stages.items():
        assert by_hand(stage, tmp_path / label)["fingerprint"] == stage["fingerprint"], label
