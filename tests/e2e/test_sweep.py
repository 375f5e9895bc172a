"""Sweeps through the real commands: what trials share, interruptions, failures, halving, and the comparison."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.chain import Chain, prepared_chain, wait_until
from tests.helpers.support import assert_same_bytes, metrics

pytestmark = pytest.mark.slow

RATES = ("0.001", "0.01")
GRID = f"[grid.phase1]\nlr = [{', '.join(RATES)}]\n"


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """A sweep with a rung at step 3 that was killed in its first training and restarted. It stopped one trial. Complete
    stages go to a store."""
    chain = prepared_chain(tmp_path_factory).copy(tmp_path_factory.mktemp("sweep"))
    chain.config.write_text(f"{chain.config.read_text()}\n[store]\nurl = {chain.directory / 'store'}\nlease_s = 3\n")
    grid = write(chain, GRID + "[halving]\nrungs = [3]\nkeep = 0.5\n")
    passed = chain.directory / "failpoints"
    process = chain.start(
        "Sweep", "--grid", str(grid), FAILPOINT="step:2.0", FAILPOINT_ACTION="wait 600", FAILPOINT_LOG=str(passed)
    )
    wait_until(lambda: passed.exists() and "step:2.0" in passed.read_text())
    chain.lose(process)
    done = chain.run("Sweep", "--grid", str(grid))
    assert "not pushed" not in done.stderr, "a trial that has stopped is no complete stage"
    return chain


def write(chain: Chain, text: str, name: str = "rates") -> Path:
    path = chain.directory / f"{name}.toml"
    path.write_text(text)
    return path


def trainings(chain: Chain) -> dict[str, Path]:
    """The directories of phase 1 by learning rate, as their records say."""
    found = {}
    for path in chain.work.glob("pretrain-phase1-*"):
        found[str(json.loads((path / "stage.json").read_text())["parameters"]["lr"])] = path
    return found


def evaluation(chain: Chain, training: Path) -> dict[str, Any]:
    """evaluation.json of the model that was merged from the last checkpoint of `training`."""
    fingerprint = json.loads((training / "stage.json").read_text())["fingerprint"]
    for merged in chain.work.glob("merge_shards-*/stage.json"):
        record = json.loads(merged.read_text())
        if record["upstream"]["pretrain"] != fingerprint or "step" in record["parameters"]:
            continue
        for evaluated in chain.work.glob("evaluate-*/stage.json"):
            if json.loads(evaluated.read_text())["upstream"]["merge_shards"] == record["fingerprint"]:
                return json.loads((evaluated.parent / "evaluation.json").read_text())  # type: ignore[no-any-return]
    raise AssertionError(f"{training} was not evaluated")


def test_trials_share_what_they_have_in_common(swept: Chain) -> None:
    count = {label: len(list(swept.work.glob(f"{label}-*"))) for label in ("tokenize_corpus", "shard_dataset-phase1")}
    assert count == {"tokenize_corpus": 1, "shard_dataset-phase1": 1}
    assert len(list(swept.work.glob("precompile-phase1-*"))) == 1
    assert trainings(swept).keys() == set(RATES)


def test_half_of_the_trials_stop_at_an_exact_checkpoint(swept: Chain) -> None:
    done = {lr for lr, path in trainings(swept).items() if (path / "manifest.json").exists()}
    (kept,), (stopped,) = done, set(RATES) - done
    assert len(metrics(trainings(swept)[kept])) == 8
    assert [record["step"] for record in metrics(trainings(swept)[stopped])] == [1, 2, 3]
    assert (trainings(swept)[stopped] / "checkpoints" / "ckpt_3" / "manifest.json").exists()
    at_rung = {}
    for merged in swept.work.glob("merge_shards-*/stage.json"):
        record = json.loads(merged.read_text())
        if record["parameters"].get("step") == 3:
            lr = next(
                lr for lr, path in trainings(swept).items() if path.name.endswith(record["upstream"]["pretrain"][:10])
            )
            for evaluated in swept.work.glob("evaluate-*"):
                upstream = json.loads((evaluated / "stage.json").read_text())["upstream"]
                if upstream["merge_shards"] == record["fingerprint"]:
                    at_rung[lr] = json.loads((evaluated / "evaluation.json").read_text())["masked_lm_loss"]
    assert min(at_rung, key=lambda lr: at_rung[lr]) == kept
    assert at_rung.keys() == set(RATES)


def test_the_comparison_shows_what_is_on_the_disk(swept: Chain) -> None:
    said = swept.ask("compare", str(swept.directory / "rates.toml")).stdout
    (kept,) = (lr for lr, path in trainings(swept).items() if (path / "manifest.json").exists())
    (stopped,) = set(RATES) - {kept}
    lines = [re.split(r"\s{2,}", line) for line in said.splitlines() if line.startswith("lr=")]
    head = re.split(r"\s{2,}", said.splitlines()[0])
    assert head == ["trial", "lr", "steps", "training loss", "held-out loss", "accuracy", "time", "state"]
    found = evaluation(swept, trainings(swept)[kept])
    rows = {line[0]: dict(zip(head, line, strict=True)) for line in lines if len(line) == len(head)}
    row = rows[f"lr={kept}"]
    losses = [record["masked_lm_loss"] for record in metrics(trainings(swept)[kept])]
    assert (row["lr"], row["steps"], row["state"]) == (kept, "8", "complete")
    assert float(row["training loss"]) == pytest.approx(sum(losses) / len(losses), rel=1e-3)
    assert float(row["held-out loss"]) == pytest.approx(found["masked_lm_loss"], rel=1e-3)
    assert row["accuracy"] == f"{found['masked_lm_accuracy']:.1%}"
    assert rows[f"lr={stopped}"]["state"] == "stopped at step 3"
    assert f"winner: lr={kept}, {row['held-out loss']} held-out masked-LM loss" in said
    page = (swept.work / "compare-rates.html").read_text()
    parser = HTMLParser()
    parser.feed(page)
    assert page.count('<svg viewBox="0 0 1168 340"') == 2
    assert not re.search(r"(?:src|href)=\"(?!data:)", page)
    assert row["held-out loss"] in page


def test_all_trainings_of_a_work_directory_can_be_compared(swept: Chain) -> None:
    said = swept.ask("compare").stdout
    for path in trainings(swept).values():
        assert path.name in said
    assert "not finished" in said
    assert (swept.work / "compare.html").exists()


def test_what_was_evaluated_at_a_rung_is_not_what_a_training_ended_with(swept: Chain, tmp_path: Path) -> None:
    copy = swept.copy(tmp_path / "copy")
    (stopped,) = (lr for lr, path in trainings(copy).items() if not (path / "manifest.json").exists())

    def held_out_loss() -> str:
        lines = [re.split(r"\s{2,}", line) for line in copy.ask("compare").stdout.splitlines()]
        name = trainings(copy)[stopped].name
        (row,) = (line for line in lines if line[0] == name and len(line) == len(lines[0]))
        return row[lines[0].index("held-out loss")]

    assert re.fullmatch(r"\d+\.\d+", held_out_loss())
    copy.run("Pretrain", "--phase", "1", "--Phase1-lr", stopped)
    assert held_out_loss() in ("", "–")


def test_clean_keeps_what_a_sweep_has_made(swept: Chain) -> None:
    said = swept.ask("clean").stdout.splitlines()
    assert not [line for line in said if line.startswith("superseded")], said
    assert [line for line in said if line.startswith("kept") and "sweep rates" in line], said


def test_a_trial_that_is_brought_back_ends_as_if_it_had_never_stopped(swept: Chain, tmp_path: Path) -> None:
    """So does the one that continued: both are compared with direct runs."""
    copy = swept.copy(tmp_path / "copy")
    (stopped,) = (lr for lr, path in trainings(copy).items() if not (path / "manifest.json").exists())
    grid = write(copy, GRID + f'[halving]\nrungs = [3]\nkeep = 0.5\nbring_back = ["lr={stopped}"]\n')
    done = copy.run("Sweep", "--grid", str(grid))
    assert f"trial lr={stopped} is brought back" in done.stdout + done.stderr
    for lr, path in trainings(copy).items():
        fresh = swept.copy(tmp_path / lr)
        for old in trainings(fresh).values():
            (old / "checkpoints").rename(fresh.directory / f"old-{old.name}")
            old.rename(fresh.directory / old.name)
        fresh.run("Pretrain", "--phase", "1", "--Phase1-lr", lr)
        direct = trainings(fresh)[lr]
        assert direct.name == path.name
        assert_same_bytes(path / "checkpoints" / "ckpt_8", direct / "checkpoints" / "ckpt_8")


def test_a_trial_that_was_past_the_rung_goes_on_and_the_others_are_ranked_by_held_out_loss(
    swept: Chain, tmp_path: Path
) -> None:
    """The kept trial has no checkpoint of step 4."""
    copy = swept.copy(tmp_path / "copy")
    (kept,) = (lr for lr, path in trainings(copy).items() if (path / "manifest.json").exists())
    others = "[trials.slow.phase1]\nlr = 1e-6\n[trials.slower.phase1]\nlr = 1e-7\n"
    text = f"[trials.done.phase1]\nlr = {kept}\n{others}[halving]\nrungs = [4]\nkeep = 0.5\n"
    done = copy.run("Sweep", "--grid", str(write(copy, text, "past")))
    lines = re.findall(r"step 4: trial (\w+) (.*)", done.stdout + done.stderr)
    assert ("done", "continues, not ranked: it was not evaluated at this step") in lines
    ranked = {name: said for name, said in lines if name != "done"}
    assert ranked.keys() == {"slow", "slower"}
    assert all(said.endswith(" held-out masked-LM loss") for said in ranked.values())
    assert sorted(said.split(":")[0] for said in ranked.values()) == ["continues", "stops"]


def test_losses_on_different_examples_are_said_not_to_compare(swept: Chain, tmp_path: Path) -> None:
    copy = swept.copy(tmp_path / "copy")
    text = "[grid.corpus]\nvocab_size = [100, 200]\n[halving]\nrungs = [2]\n"
    grid = write(copy, text, "vocabularies")
    done = copy.run("Sweep", "--grid", str(grid))
    said, why = done.stdout + done.stderr, "the trials were evaluated on different held-out examples"
    assert f"step 2: note: {why}: their losses cannot be compared" in said
    assert f"sweep vocabularies: no winner: {why}" in said
    assert f"no winner: {why}" in copy.ask("compare", str(grid)).stdout


def test_data_sets_of_the_same_held_out_text_compare(swept: Chain, tmp_path: Path) -> None:
    """Copies and masks of the training examples are no part of what is held out."""
    copy = swept.copy(tmp_path / "copy")
    grid = write(copy, "[grid.dataset]\ndupe_factor = [1, 2]\n", "masks")
    done = copy.run("Sweep", "--grid", str(grid))
    assert "sweep masks: winner: " in done.stdout + done.stderr


def test_a_failed_trial_does_not_stop_the_others(swept: Chain, tmp_path: Path) -> None:
    copy = swept.copy(tmp_path / "copy")
    (kept,) = (lr for lr, path in trainings(copy).items() if (path / "manifest.json").exists())
    text = f"[trials.diverges.phase1]\nlr = 1e30\nmax_grad_norm = 0\n[trials.good.phase1]\nlr = {kept}\n"
    done = copy.run("Sweep", "--grid", str(write(copy, text, "failing")), "--Run-non-finite", "stop", status=30)
    said = done.stdout + done.stderr
    assert "trial diverges failed: pretrain-phase1 failed" in said
    assert "1 of 2 trials failed: diverges" in said
    assert "winner: good" in said


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (
            '[grid.phase1]\nlr = [0.1, "fast"]\nspeed = [1]\n[grid.fase1]\nlr = [1]\n[trials.a.run]\nwork_dir = "x"\n',
            ["lr = 'fast' is not allowed", "[phase1] speed is not a setting", "[fase1] is not a section", "work_dir"],
        ),
        ("[grid.phase1]\nlr = 0.1\n", ["grid.phase1.lr is not a list of values"]),
        ("goal = 3\n[halving]\nrungs = [4, 2]\nkeep = 0\n", ["goal = 3", "rungs = [4, 2]", "keep = 0"]),
        (GRID + "[halving]\nrungs = [8]\n", ["halving.rungs has 8, and [phase1] max_steps is 8"]),
        (
            GRID.replace("[grid.phase1]", '[grid.phase1]\nbudget = ["20m"]') + "[halving]\nrungs = [4]\n",
            ["halving.rungs are steps, and how many fit into [phase1] budget = 20m is not known yet"],
        ),
        ("[trials.a.phase1]\nlr = 0.1\n[trials.b.phase1]\nlr = 0.10\n", ["trials a and b have the same result"]),
        (GRID + '[halving]\nrungs = [4]\nbring_back = [["a"]]\n', ["halving.bring_back = [['a']] is not allowed"]),
        ("grid = [", ["is not TOML"]),
        ("", ["there is no trial"]),
    ],
)
def test_every_error_of_the_file_is_told_before_anything_starts(tmp_path: Path, text: str, lines: list[str]) -> None:
    chain = Chain(tmp_path)
    done = chain.run("Sweep", "--grid", str(write(chain, text)), status=35)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in done.stderr
    for line in lines:
        assert sum(line in error for error in errors) >= 1, done.stderr
    assert not list(chain.work.glob("*-*"))
