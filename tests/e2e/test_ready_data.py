"""The chain on downloaded shards, with the vocabulary they were made with, and with minimal last checkpoints."""

from __future__ import annotations

import string
from pathlib import Path

import pytest

from tests.helpers.chain import LUIGI, Chain
from tests.helpers.ready import write
from tests.helpers.support import assert_one_line_error, command

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [a + b for a in "bcdfg" for b in string.ascii_lowercase][: 100 - len(SPECIAL)]


def ready_chain(tmp_path: Path) -> tuple[Chain, list[str]]:
    """A chain, and the options that give it shards of 100 ids and their vocabulary."""
    options = ["--Model-vocab-size", "104"]  # filled up to a multiple of 8
    for phase, seq_len, max_pred_len in ((1, 32, 5), (2, 64, 10)):
        folder = tmp_path / f"phase{phase}"
        for name in ("training", "test"):
            write(folder / f"x_{name}_0.hdf5", rows=20, S=seq_len, P=max_pred_len)
        options += [f"--Dataset-phase{phase}-url", str(folder)]
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join([*SPECIAL, *WORDS]) + "\n")
    return Chain(tmp_path), [*options, "--Corpus-vocab-file", str(vocabulary)]


@pytest.mark.slow
def test_the_vocabulary_goes_beside_the_model_and_a_minimal_checkpoint_is_enough(tmp_path: Path) -> None:
    """Phase 1 is killed after a checkpoint and resumes; its last checkpoint has weights only."""
    chain, options = ready_chain(tmp_path)
    (tmp_path / "token").touch()
    env = {"FAILPOINT": "rename-after:ckpt_3", "FAILPOINT_TOKEN": str(tmp_path / "token")}
    done = chain.run("BertPhase2", *options, "--Phase1-minimal-ckpt", "true", **env)
    assert "starting again" in done.stderr
    assert "resuming from checkpoint" in done.stderr
    for phase, with_optimizer in ((1, False), (2, True)):
        stage = f"pretrain-phase{phase}"
        counts = chain.manifest(stage)["counts"]
        assert isinstance(counts, dict)
        files = {path.name for path in (chain.latest(stage) / counts["checkpoint"]).glob("*.safetensors")}
        assert any(name.startswith("optimizer") for name in files) is with_optimizer, files
    model = chain.latest("merge_shards") / "model"
    assert (model / "vocab.txt").read_text().split() == [*SPECIAL, *WORDS]
    said = command("-m", "stages.predict", str(model), "Ba [MASK] fo.")
    assert said.returncode == 0, said.stderr
    assert len([line for line in said.stdout.splitlines() if "%" in line]) == 5


def test_a_vocabulary_that_the_model_cannot_know_is_one_line(tmp_path: Path) -> None:
    chain, options = ready_chain(tmp_path)
    env = {"LUIGI_CONFIG_PATH": str(chain.config)}
    missing = command(*LUIGI, "BertPhase2", *options, "--Corpus-vocab-file", str(tmp_path / "no.txt"), env=env)
    assert_one_line_error(missing, "no.txt", status=35)
    checkpoint, out = tmp_path / "checkpoint", tmp_path / "out"
    broken = tmp_path / "broken.txt"
    broken.write_text("a\nb\n")
    done = command("-m", "stages.merge", str(checkpoint), str(out), "--vocab-file", str(broken))
    assert_one_line_error(done, "lacks [PAD]")
