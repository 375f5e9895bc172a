"""A training that differs from an earlier one only in its end continues from that one's last stable checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.lock import hold
from tests.helpers.chain import Chain, prepared_chain, write_corpus
from tests.helpers.support import assert_same_bytes, metrics

STABLE = ("--Phase1-schedule", "wsd", "--Phase1-decay-share", "0.5", "--Phase1-num-ckpts-to-keep", "1")
SHORT = ("Pretrain", "--phase", "1", *STABLE)
#: 12 steps: the decay begins with step 6, later than that of 8 steps.
LONG = (*SHORT, "--Phase1-max-steps", "12")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """A prepared chain with a training of 8 steps."""
    chain = prepared_chain(tmp_path_factory).copy(tmp_path_factory.mktemp("chain"))
    chain.run(*SHORT)
    return chain


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a training of 12 steps that started from scratch."""
    chain = prepared_chain(tmp_path_factory).copy(tmp_path_factory.mktemp("scratch"))
    chain.run(*LONG)
    return chain.latest("pretrain-phase1")


def checkpoints(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "checkpoints").iterdir())


def assert_like_scratch(chain: Chain, scratch: Path) -> Path:
    directory = chain.latest("pretrain-phase1")
    assert_same_bytes(directory / "checkpoints" / "ckpt_12", scratch / "checkpoints" / "ckpt_12")
    assert [record["step"] for record in metrics(directory)] == list(range(1, 13))
    assert [record["loss"] for record in metrics(directory)] == [record["loss"] for record in metrics(scratch)]
    return directory


@pytest.mark.slow
def test_more_steps_go_on_from_the_last_stable_checkpoint(prepared: Chain, scratch: Path, tmp_path: Path) -> None:
    """This includes dynamic masks with a falling rate."""
    chain = prepared.copy(tmp_path / "chain")
    before = chain.latest("pretrain-phase1")
    assert checkpoints(before) == ["ckpt_4", "ckpt_8"]
    said = f"step 4 of {before.name}"
    reason = chain.ask("why", "Pretrain", "--phase", "1", status=1, **longer(chain)).stdout
    assert f"it would continue from {said}" in reason
    assert f"would continue from {said}" in chain.status(**longer(chain))["pretrain-phase1"]["detail"]
    assert (
        f"kept        {before}: pretrain-phase1 would continue from its step 4"
        in chain.ask("clean", **longer(chain)).stdout
    )
    out = chain.run(*LONG)
    assert f"continues from {said}, up to which the two are the same" in out.stdout + out.stderr
    after = assert_like_scratch(chain, scratch)
    assert after != before
    extended = chain.manifest("pretrain-phase1")["counts"]["extended_from"]  # type: ignore[index]
    assert (extended["directory"], extended["step"]) == (before.name, 4)
    assert f"continued from {said}" in chain.status(**longer(chain))["pretrain-phase1"]["detail"]
    # The earlier one is unchanged.
    assert checkpoints(before) == ["ckpt_4", "ckpt_8"]
    assert "complete" in chain.ask("why", "Pretrain", "--phase", "1", **shorter(chain)).stdout


def longer(chain: Chain, steps: int = 12) -> dict[str, str]:
    path = chain.directory / f"{steps}.cfg"
    text = chain.config.read_text().replace("max_steps = 8", f"max_steps = {steps}")
    path.write_text(text.replace("[phase2]", "schedule = wsd\ndecay_share = 0.5\n[phase2]"))
    return {"LUIGI_CONFIG_PATH": str(path)}


def shorter(chain: Chain) -> dict[str, str]:
    return longer(chain, 8)


@pytest.mark.parametrize("point", ["rename-before:ckpt_4", "rename-after:ckpt_4", "rename-before:ckpt_9"])
def test_killed_on_the_way_it_goes_on_and_ends_the_same(
    prepared: Chain, scratch: Path, tmp_path: Path, point: str
) -> None:
    """While the checkpoint is linked, and while the training continues from it."""
    chain = prepared.copy(tmp_path / "chain")
    killed = chain.start(*LONG, FAILPOINT=point, FAILPOINT_ACTION="kill")
    assert killed.wait(timeout=300) != 0
    out = chain.run(*LONG)
    assert ("continues from step 4" in out.stdout + out.stderr) is (point == "rename-before:ckpt_4")
    after = assert_like_scratch(chain, scratch)
    assert json.loads((after / "manifest.json").read_text())["counts"]["extended_from"]["step"] == 4


def test_a_constant_training_is_finished_with_a_short_decay(prepared: Chain, tmp_path: Path) -> None:
    chain, other = prepared.copy(tmp_path / "chain"), prepared.copy(tmp_path / "other")
    finish = ("Pretrain", "--phase", "1", "--Phase1-schedule", "wsd", "--Phase1-max-steps", "10",
              "--Phase1-decay-share", "0.2")  # fmt: skip
    chain.run("Pretrain", "--phase", "1", "--Phase1-schedule", "constant")
    out = chain.run(*finish)
    assert "continues from step 8 of" in out.stdout + out.stderr
    for path in other.work.glob("pretrain-phase1-*"):
        path.rename(other.directory / path.name)  # nothing to continue from
    out = other.run(*finish)
    assert "continues from" not in out.stdout + out.stderr
    ckpt = "checkpoints/ckpt_10"
    assert_same_bytes(chain.latest("pretrain-phase1") / ckpt, other.latest("pretrain-phase1") / ckpt)


@pytest.mark.slow
def test_a_trial_of_a_sweep_goes_on_from_no_step_after_its_rung(prepared: Chain, tmp_path: Path) -> None:
    """The earlier training's stable checkpoint is that of step 4."""
    chain = prepared.copy(tmp_path / "chain")
    grid = tmp_path / "grid.toml"
    grid.write_text('goal = "BertPhase1"\n[grid.phase1]\nmax_steps = [12, 16]\n[halving]\nrungs = [2]\nkeep = 1\n')
    done = chain.run("Sweep", "--grid", str(grid), *STABLE)
    assert "continues from step 4" not in done.stdout + done.stderr
    assert "failed" not in done.stdout + done.stderr
    for steps in (12, 16):
        assert f"step 2: trial max_steps={steps} continues: " in done.stdout + done.stderr


def test_a_training_that_runs_is_not_read(prepared: Chain, scratch: Path, tmp_path: Path) -> None:
    chain = prepared.copy(tmp_path / "chain")
    before = chain.latest("pretrain-phase1")
    (before / "manifest.json").unlink()
    with hold(before):
        out = chain.run(*LONG)
    said = out.stdout + out.stderr
    assert f"does not continue from a checkpoint of {before.name}" in said
    assert "trains from step 0 instead" in said
    assert "extended_from" not in chain.manifest("pretrain-phase1")["counts"]  # type: ignore[operator]
    assert_like_scratch(chain, scratch)


def test_a_complete_training_is_read_whoever_holds_it(prepared: Chain, scratch: Path, tmp_path: Path) -> None:
    """Its upload to a store, for example, which takes long."""
    chain = prepared.copy(tmp_path / "chain")
    before = chain.latest("pretrain-phase1")
    with hold(before):
        out = chain.run(*LONG)
    assert f"continues from step 4 of {before.name}" in out.stdout + out.stderr
    assert_like_scratch(chain, scratch)


def test_a_damaged_checkpoint_is_left_out(prepared: Chain, scratch: Path, tmp_path: Path) -> None:
    chain = prepared.copy(tmp_path / "chain")
    weights = chain.latest("pretrain-phase1") / "checkpoints" / "ckpt_4" / "model-00-of-01.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    out = chain.run(*LONG)
    said = out.stdout + out.stderr
    assert "cannot continue from step 4" in said
    assert "its sha256 is not the manifest's" in said
    assert "trains from step 0 instead" in said
    assert_like_scratch(chain, scratch)


@pytest.mark.parametrize("change", [("--Phase1-lr", "1e-3"), ("--Run-seed", "7"), ("--Phase1-schedule", "linear")])
def test_what_differs_earlier_is_trained_anew(prepared: Chain, tmp_path: Path, change: tuple[str, str]) -> None:
    chain = prepared.copy(tmp_path / "chain")
    out = chain.run(*LONG, *change)
    assert "continue from" not in out.stdout + out.stderr
    assert "continues from" not in out.stdout + out.stderr


@pytest.mark.slow
def test_phase_2_is_extended_alone_and_after_phase_1(tmp_path: Path) -> None:
    """A longer phase 2 continues the earlier phase 2; a longer phase 1 makes phase 2 another training."""
    write_corpus(tmp_path / "corpus.txt")
    chain = Chain(tmp_path)
    stable = ("--Phase1-schedule", "wsd", "--Phase2-schedule", "wsd")
    chain.run("Pretrain", "--phase", "2", *stable)
    out = chain.run("Pretrain", "--phase", "2", *stable, "--Phase2-max-steps", "8")
    said = out.stdout + out.stderr
    assert "pretrain-phase2: continues from step 3 of pretrain-phase2-" in said
    assert "pretrain-phase1: continues" not in said
    out = chain.run("Pretrain", "--phase", "2", *stable, "--Phase1-max-steps", "10", "--Phase2-max-steps", "8")
    said = out.stdout + out.stderr
    assert "pretrain-phase1: continues from step 6 of pretrain-phase1-" in said
    assert "pretrain-phase2: continues" not in said
