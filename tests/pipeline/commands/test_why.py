"""`python -m pipeline why`: names the setting, the input or the file because of which a stage would run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from stages.directory.lock import hold
from tests.helpers.chain import STAGES, Chain, finished_chain, write_corpus
from tests.helpers.support import assert_one_line_error, command


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """A chain that has run to its end; tests that change it take a copy."""
    return finished_chain(tmp_path_factory)


@pytest.mark.parametrize("words", [(), ("--verify",)], ids=str)
def test_what_is_complete_says_so_and_ends_with_0(chain: Chain, words: tuple[str, ...]) -> None:
    for task in (("Pretrain", "--phase", "1"), ("merge_shards",), ("BertPhase1",), ("BertPhase2",)):
        assert "is complete" in chain.ask("why", *task, *words).stdout


def test_a_stage_has_the_name_that_status_gives_it(chain: Chain) -> None:
    for stage in STAGES:
        assert chain.ask("why", stage).stdout.startswith(f"{stage} is complete: ")


@pytest.mark.parametrize(
    ("task", "change", "line"),
    [
        ("pretrain-phase2", ("--Phase2-lr", "1e-4"), "lr: 0.002 → 0.0001"),
        ("pretrain-phase1", ("--Model-hidden-size", "64"), "model.hidden_size: 32 → 64"),
        ("precompile-phase1", ("--Cluster-nproc-per-node", "2"), "accumulates: True → False"),
        ("shard_dataset-phase1", ("--Dataset-dupe-factor", "4"), "dupe_factor: 1 → 4"),
        (
            "pretrain-phase2",
            ("--Dataset-dupe-factor", "4"),
            "its upstream shard_dataset-phase2 would change: dupe_factor: 1 → 4",
        ),
        ("evaluate", ("--Phase1-lr", "9e-4"), "its upstream pretrain-phase1 would change: lr: 0.005 → 0.0009"),
        (
            "merge_shards",
            ("--Corpus-vocab-size", "280"),
            "its upstream tokenize_corpus would change: vocab_size: 300 → 280",
        ),
    ],
)
def test_a_setting_is_named_with_both_values(chain: Chain, task: str, change: tuple[str, ...], line: str) -> None:
    assert chain.ask("why", task, *change, status=1).stdout == f"{task} would run: {line}\n"


def test_another_text_is_named_as_the_input_it_is(chain: Chain, tmp_path: Path) -> None:
    copy = chain.copy(tmp_path / "copy")
    write_corpus(copy.directory / "corpus.txt", documents=61)
    said = copy.ask("why", "evaluate", status=1).stdout
    assert said.startswith("evaluate would run: its upstream tokenize_corpus would change: inputs.sources: ")


def test_an_upstream_stage_that_is_gone_is_named(chain: Chain, tmp_path: Path) -> None:
    copy = chain.copy(tmp_path / "copy")
    old = copy.latest("shard_dataset-phase2")
    shutil.rmtree(old)
    said = copy.ask("why", "pretrain-phase2", "--Dataset-dupe-factor", "4", status=1).stdout
    short = old.name[-10:]
    assert f"its upstream shard_dataset-phase2 would change (the previous one, {short}, is gone" in said


def test_the_stages_it_names_are_those_that_luigi_runs(chain: Chain, tmp_path: Path) -> None:
    copy = Chain(chain.copy(tmp_path / "copy").directory, "[evaluation]\nmax_samples = 4\n")
    change = ("--Phase2-max-steps", "2")
    shutil.rmtree(copy.latest("precompile-phase2"))
    named = [
        line.split(" would run")[0] for line in copy.ask("why", "BertPhase2", *change, status=1).stdout.split("\n")
    ]
    done = copy.run("BertPhase2", *change)
    started = [line.split(":")[0] for line in done.stderr.splitlines() if ": started in " in line]
    assert [name for name in named if name] == started
    assert "precompile-phase2" in started
    copy.ask("why", "BertPhase2", *change)


def test_the_file_that_is_missing_or_short_is_named(chain: Chain, tmp_path: Path) -> None:
    copy = chain.copy(tmp_path / "copy")
    shard = next(iter(sorted(copy.latest("shard_dataset-phase1").glob("*_training_*.hdf5"))))
    size = shard.stat().st_size
    os.truncate(shard, size - 1)
    said = copy.ask("why", "shard_dataset-phase1", status=1).stdout
    assert f"{shard.name} has {size - 1} bytes, its manifest says {size}" in said
    shard.unlink()
    assert f"{shard.name} is missing" in copy.ask("why", "ShardDataset", "--phase", "1", status=1).stdout


# The report names its directory, and a copy is in another one.
@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage != "report"])
def test_verify_finds_one_flipped_bit_and_what_it_advises_mends_it(chain: Chain, tmp_path: Path, stage: str) -> None:
    """The file that is made again has the same bytes as before."""
    copy = chain.copy(tmp_path / "copy")
    outputs = copy.manifest(stage)["outputs"]
    assert isinstance(outputs, list)
    path = copy.latest(stage) / outputs[0]["path"]
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    copy.ask("why", stage)
    said = copy.ask("why", stage, "--verify", status=1).stdout
    assert f"{outputs[0]['path']} was altered" in said
    assert "remove that file and run the same again" in said
    assert said in copy.ask("why", "BertPhase2", "--verify", status=1).stdout
    path.unlink()
    name, _, phase = stage.partition("-phase")
    task = "BertPhase2" if name == "evaluate" else name.title().replace("_", "")
    copy.run(task, *(["--phase", phase] if phase else []))
    assert path.read_bytes() == content
    copy.ask("why", stage, "--verify")


def test_a_removed_checkpoint_is_named_and_training_goes_on_from_the_one_before(chain: Chain, tmp_path: Path) -> None:
    copy = chain.copy(tmp_path / "copy")
    directory = copy.latest("pretrain-phase1")
    shutil.rmtree(directory / "checkpoints" / "ckpt_8")
    assert "is missing" in copy.ask("why", "pretrain-phase1", status=1).stdout
    (directory / "manifest.json").unlink()
    said = copy.ask("why", "pretrain-phase1", status=1).stdout
    assert said == "pretrain-phase1 would run: it was interrupted, and resumes from step 6 of 8\n"


def test_a_running_stage_is_said_to_run(chain: Chain, tmp_path: Path) -> None:
    copy = chain.copy(tmp_path / "copy")
    directory = copy.latest("convert_checkpoint")
    (directory / "manifest.json").unlink()
    with hold(directory):
        said = copy.ask("why", "convert_checkpoint", status=1).stdout
    assert said.startswith(f"convert_checkpoint is running: process {os.getpid()} on ")


def test_a_failed_stage_says_with_what(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    assert chain.ask("why", "tokenize_corpus", status=1).stdout == "tokenize_corpus would run: it was never started\n"
    (tmp_path / "corpus.txt").write_bytes(b"A sentence.\n\xff\xfe broken\n")
    chain.run("TokenizeCorpus", status=30)
    said = chain.ask("why", "tokenize_corpus", status=1).stdout
    assert said.startswith("tokenize_corpus would run again: it failed at 20")
    assert "corpus.txt" in said
    said = chain.ask("why", "shard_dataset-phase1", status=1).stdout
    assert said.endswith("it was never started; tokenize_corpus would run first\n")


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        (("Pretrian",), ["there is no task Pretrian; did you mean Pretrain?"]),
        (("Xyz",), ["there is no task Xyz; allowed: BertPhase1, ", "MergeShards"]),
        (("Pretrain",), ["Pretrain has a phase", "--phase 1, --phase 2"]),
        (("Pretrain", "--phase", "3"), ["Pretrain has a phase"]),
        (("MergeShards", "--phase", "1"), ["MergeShards has no phase"]),
        (("pretrain-phaseX",), ["there is no task pretrain-phaseX"]),
        (("DownloadDataset", "--phase", "1"), ["[dataset] phase1_url is empty"]),
    ],
    ids=str,
)
def test_what_it_cannot_answer_is_one_line(chain: Chain, words: tuple[str, ...], fragments: list[str]) -> None:
    done = command("-m", "pipeline", "why", *words, env={"LUIGI_CONFIG_PATH": str(chain.config)})
    assert_one_line_error(done, *fragments, status=35)
