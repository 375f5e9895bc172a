"""[phase2] start_from: phase 2 starts from a given checkpoint, in place of phase 1."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.helpers.chain import LUIGI, Chain, finished_chain
from tests.helpers.support import assert_one_line_error, command, forked, tensors

FORMATS = {"pt": "ckpt_8.pt", "hf": "model"}


def trained(chain: Chain) -> Path:
    """The checkpoint that phase 2 ended with."""
    counts = chain.manifest("pretrain-phase2")["counts"]
    assert isinstance(counts, dict)
    return chain.latest("pretrain-phase2") / str(counts["checkpoint"])


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_phase_2_from_a_given_checkpoint_is_that_from_phase_1(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, form: str
) -> None:
    """Phase 1's result in another format, given to a chain that has trained nothing, leads to the same bytes."""
    straight = finished_chain(tmp_path_factory)
    phase1 = straight.latest("convert_checkpoint") / "checkpoint"
    # The other formats have no place for Muon's moments, which phase 2 does not need.
    assert forked("stages.convert", phase1, tmp_path / "given", "--to", form, "--no-optimizer").returncode == 0
    given = tmp_path / "given" / FORMATS[form]
    shutil.copy(straight.directory / "corpus.txt", tmp_path)
    chain = Chain(tmp_path)
    done = chain.run("BertPhase2", "--Phase2-start-from", str(given))
    assert f"phase 1: replaced by step 8 of {given}" in done.stderr
    stages = {path.name for path in (chain.work / "latest").iterdir()}
    assert not {"pretrain-phase1", "precompile-phase1", "shard_dataset-phase1"} & stages
    counts = chain.manifest("convert_checkpoint")["counts"]
    assert isinstance(counts, dict)
    assert (counts["phase"], counts["global_step"], counts["with_optimizer"]) == (1, 8, False)
    ours, theirs = (tensors(trained(c)) for c in (chain, straight))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].tobytes() == tensor.tobytes() for name, tensor in theirs.items())
    # Run again: there is nothing to do, and the output says what is there.
    assert "phase 1: replaced by" in chain.run("BertPhase2", "--Phase2-start-from", str(given)).stderr
    assert "is complete" in chain.ask("why", "BertPhase2", "--Phase2-start-from", str(given)).stdout


def test_a_checkpoint_of_another_model_fails_with_one_line(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    chain = finished_chain(tmp_path_factory).copy(tmp_path / "chain")
    given = shutil.copytree(chain.latest("merge_shards") / "model", tmp_path / "model")
    config = json.loads((given / "config.json").read_text())
    (given / "config.json").write_text(json.dumps({**config, "num_attention_heads": 4}))
    done = chain.run("ConvertCheckpoint", "--Phase2-start-from", str(given), status=30)
    assert "holds another model: its num_attention_heads is 4, not 2" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_checkpoint_that_is_not_there_is_refused_before_anything_starts(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    env = {"LUIGI_CONFIG_PATH": str(chain.config)}
    done = command(*LUIGI, "BertPhase2", "--Phase2-start-from", str(tmp_path / "no.pt"), env=env)
    assert_one_line_error(done, "there is no checkpoint", "no.pt", status=35)
    assert not chain.work.exists() or not chain.directories()
