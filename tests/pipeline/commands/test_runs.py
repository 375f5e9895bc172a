"""`python -m pipeline runs`: what the manifests in the work directory and in the store say."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from common.files import read_json
from stages.directory.attempts import record_failure
from stages.directory.lock import hold
from stages.directory.manifest import MANIFEST
from tests.helpers.chain import Chain, finished_chain, wait_until, write_corpus
from tests.helpers.runs import EVALUATION, write_stage
from tests.helpers.support import assert_one_line_error, command

SHARED = {"tokenize_corpus": {"vocab_size": 300}, "shard_dataset": {"masking": "dynamic", "max_pred_len": 5}}


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return finished_chain(tmp_path_factory)


def write_chain(work: Path, lr: float, loss: float, **phase1: Any) -> list[Path]:
    """Made-up directories: both trainings, and what leads from one to the other and from there to an evaluation."""
    tokens = work / "tokens"
    first, second = (
        {"lr": lr, "seq_len": length, "seed": 7, "max_steps": steps, "model": {"preset": "tiny"}, "pack": False}
        for length, steps in ((128, 20), (512, 5))
    )
    if not tokens.exists():
        made = write_stage(work, "tokenize_corpus", counts={}, parameters=SHARED["tokenize_corpus"], data=b"123")
        tokens.symlink_to(made)
    one = write_stage(
        work,
        "pretrain",
        1,
        counts={"steps": 20},
        parameters={**first, **phase1},
        upstream={"tokens": tokens},
        w=bytes(100),
    )
    converted = write_stage(
        work, "convert_checkpoint", counts={}, parameters={}, upstream={"pretrain": one}, w=bytes(100)
    )
    two = write_stage(work, "pretrain", 2, counts={"steps": 5}, parameters=second, upstream={"start": converted})
    merged = write_stage(work, "merge_shards", counts={}, parameters={}, upstream={"pretrain": two})
    counts = {**EVALUATION, "masked_lm_loss": loss}
    evaluated = write_stage(work, "evaluate", counts=counts, parameters={}, upstream={"merge_shards": merged})
    return [one, converted, two, merged, evaluated]


def runs(work: Path, *words: str) -> list[dict[str, Any]]:
    done = command("-m", "pipeline", "runs", "--json", "--Run-work-dir", str(work), *words)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def said(work: Path, *words: str) -> str:
    done = command("-m", "pipeline", "runs", "--Run-work-dir", str(work), *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def disk_bytes(*directories: Path) -> int:
    return sum(path.stat().st_size for one in directories for path in one.rglob("*") if path.is_file())


def test_an_empty_work_directory_is_one_line(tmp_path: Path) -> None:
    for work in (tmp_path, tmp_path / "none"):
        line = f"there is no training run in {work}; start one with `luigi --module pipeline BertPhase2`\n"
        assert said(work) == line
        assert said(work, "--where", "Phase1-lr=1") == f"there is no training run with Phase1-lr=1 in {work}\n"
        assert runs(work) == []


def test_a_finished_chain_is_one_line_with_what_its_manifests_say(chain: Chain) -> None:
    (found,) = json.loads(chain.ask("runs", "--json").stdout)
    evaluated: Any = chain.manifest("evaluate")["counts"]
    assert found["name"] == chain.latest("pretrain-phase2").name
    assert (found["state"], found["here"], found["stored"]) == ("complete", True, False)
    assert (found["loss"], found["accuracy"]) == (evaluated["masked_lm_loss"], evaluated["masked_lm_accuracy"])
    assert found["steps"] == [{"done": 8, "total": 8}, {"done": 4, "total": 4}]
    stages = ("pretrain-phase1", "convert_checkpoint", "pretrain-phase2", "merge_shards", "evaluate")
    assert found["bytes"] == disk_bytes(*map(chain.latest, stages))
    head, line = chain.ask("runs").stdout.splitlines()
    assert head.split() == ["run", "when", "state", "steps", "loss", "accuracy", "size", "settings"]
    assert f"complete  8 + 4  {evaluated['masked_lm_loss']:.4g}" in line


#: Prints every setting as the command line names it.
_SETTINGS = """
import json
import pipeline
from pipeline.settings.load import load
from pipeline.settings.sections import SECTIONS, section_name
text = lambda v: "" if v is None else str(v).lower() if isinstance(v, bool) else str(v)
print(json.dumps({f"{s.__name__}-{k.replace('_', '-')}": text(v) for s in SECTIONS
                  for k, v in getattr(load(), section_name(s)).param_kwargs.items()}))
"""


def test_settings_have_the_names_and_values_that_the_command_line_gives_them(chain: Chain) -> None:
    (found,) = json.loads(chain.ask("runs", "--json").stdout)
    done = command("-c", _SETTINGS, env={"LUIGI_CONFIG_PATH": str(chain.config)})
    given = json.loads(done.stdout)
    assert given["Phase2-final-masked-lm-prob"] == ""
    given["Phase2-final-masked-lm-prob"] = given["Phase2-masked-lm-prob"]  # what empty means, and what is recorded
    recorded = {name: value for name, value in found["settings"].items() if name in given}
    assert len(recorded) > 40
    assert recorded == {name: given[name] for name in recorded}
    assert {"Phase1-lr", "Phase2-max-steps", "Model-hidden-size", "Corpus-vocab-size", "Run-seed"} <= recorded.keys()


def test_the_newest_is_first_and_what_differs_is_shown(tmp_path: Path) -> None:
    own = []
    for index, lr in enumerate((1e-3, 5e-4, 2e-3)):
        own.append(write_chain(tmp_path, lr, 2.0 + index))
        for directory in own[-1]:
            manifest = json.loads((directory / MANIFEST).read_text())
            (directory / MANIFEST).write_text(json.dumps({**manifest, "started": f"2026-11-1{index}T00:00:00Z"}))
    head, *lines = said(tmp_path).splitlines()
    assert [line.split("  ")[-1] for line in lines] == [
        f"Phase2-lr={lr} Phase1-lr={lr}" for lr in (0.002, 0.0005, 0.001)
    ]
    assert [run["loss"] for run in runs(tmp_path)] == [4.0, 3.0, 2.0]
    # Shared data belongs to none of them.
    assert [run["bytes"] for run in runs(tmp_path)] == [disk_bytes(*directories) for directories in reversed(own)]


def test_numbers_are_compared_as_numbers_and_unknown_settings_are_refused(tmp_path: Path) -> None:
    write_chain(tmp_path, 5e-4, 2.0)
    write_chain(tmp_path, 1e-3, 3.0, pack=True)
    for value in ("5e-4", "0.0005", "0.00050"):
        assert [run["loss"] for run in runs(tmp_path, "--where", f"Phase1-lr={value}")] == [2.0]
    assert [run["loss"] for run in runs(tmp_path, "--where", "Phase1-pack=True")] == [3.0]
    assert runs(tmp_path, "--where", "Phase1-pack=true", "--where", "Phase1-lr=5e-4") == []
    assert len(runs(tmp_path, "--where", "Run-seed=7")) == 2
    # What records leave out: they are from before the setting, or have the value that it then stood for.
    assert len(runs(tmp_path, "--where", "Phase1-next-sentence-weight=1", "--where", "Phase2-sampled-softmax=0")) == 2
    for words, line in (
        ("Phase1-lrr=1", "no run records a setting Phase1-lrr; did you mean Phase1-lr?"),
        ("Phase1-lr", "--where Phase1-lr is not allowed; allowed: SETTING=VALUE, such as Phase1-lr=5e-4"),
    ):
        done = command("-m", "pipeline", "runs", "--where", words, "--Run-work-dir", str(tmp_path))
        assert_one_line_error(done, line, status=35)


def test_an_unfinished_run_says_how_far_it_is(tmp_path: Path) -> None:
    one, converted, two, merged, evaluated = write_chain(tmp_path, 1e-3, 2.0)
    assert runs(tmp_path)[0]["state"] == "complete"
    shutil.rmtree(evaluated)
    assert (runs(tmp_path)[0]["state"], runs(tmp_path)[0]["loss"]) == ("not evaluated", None)
    (two / MANIFEST).unlink()
    (two / "progress.json").write_text(json.dumps({"done": 3, "total": 5, "unit": "steps", "per_s": 1.0}))
    assert runs(tmp_path)[0]["state"] == "interrupted"
    assert "  interrupted  20 + 3 of 5  " in said(tmp_path)
    with hold(two):
        assert runs(tmp_path)[0]["state"] == "running"
    record_failure(two, "out of memory")
    assert runs(tmp_path)[0]["state"] == "failed"
    shutil.rmtree(two)
    (found,) = runs(tmp_path)
    assert (found["state"], found["steps"], found["name"]) == (
        "phase 1 complete",
        [{"done": 20, "total": 20}],
        one.name,
    )
    assert found["bytes"] == disk_bytes(one), "phase 2's beginning is not of the run while it has no phase 2"


def test_nights_are_listed_with_their_directories(tmp_path: Path) -> None:
    here = write_chain(tmp_path, 1e-3, 2.0)
    night = write_chain(tmp_path / "nights" / "2026-11-21", 1e-3, 1.5)
    (tmp_path / "nights" / "latest").symlink_to("2026-11-21")
    (tmp_path / "nights" / "2026-11-21.json").write_text("{}")
    found = {one["name"]: one["loss"] for one in runs(tmp_path)}
    assert found == {here[2].name: 2.0, f"nights/2026-11-21/{night[2].name}": 1.5}
    for directory in here:
        shutil.rmtree(directory)
    assert said(tmp_path).splitlines()[1].startswith(f"nights/2026-11-21/{night[2].name}  ")


def test_directories_that_cannot_be_read_are_noted(tmp_path: Path) -> None:
    directory = write_chain(tmp_path, 1e-3, 2.0)[2]
    program = f"""
import sys
from pipeline.__main__ import main
from pipeline.status import stage_dirs
read = stage_dirs.read_manifest
def refused(path):
    if path.name == {directory.name!r}:
        raise PermissionError(13, "Permission denied", str(path))
    return read(path)
stage_dirs.read_manifest = refused
sys.exit(main(["runs", "--Run-work-dir", {str(tmp_path)!r}]))
"""
    done = command("-c", program)
    assert done.returncode == 0, done.stderr
    assert done.stderr == f"note: 1 stage directory cannot be read and may hold more: {directory}\n"
    assert "phase 1 complete" in done.stdout


def machine(directory: Path, store: Path) -> Chain:
    directory.mkdir(parents=True, exist_ok=True)
    write_corpus(directory / "corpus.txt")
    return Chain(directory, f"\n[store]\nurl = {store}\nlease_s = 3\n")


@pytest.mark.slow
def test_what_only_the_store_has_is_listed_as_it_was_here(tmp_path: Path) -> None:
    here = machine(tmp_path / "here", tmp_path / "store")
    here.run("BertPhase2")
    (both,) = json.loads(here.ask("runs", "--json").stdout)
    assert (both["here"], both["stored"]) == (True, True)
    elsewhere = machine(tmp_path / "elsewhere", tmp_path / "store")
    (stored,) = json.loads(elsewhere.ask("runs", "--json").stdout)
    assert (stored["here"], stored["stored"]) == (False, True)
    different = {"here", "bytes"}
    assert {k: v for k, v in stored.items() if k not in different} == {
        k: v for k, v in both.items() if k not in different
    }
    assert "  store  " in elsewhere.ask("runs").stdout.splitlines()[1] + "  "
    night = here.work / "nights" / "2026-11-21"
    here.work.rename(tmp_path / "moved")
    night.parent.mkdir(parents=True)
    (tmp_path / "moved").rename(night)
    (tonight,) = json.loads(here.ask("runs", "--json").stdout)
    assert (tonight["name"], tonight["stored"]) == (f"nights/2026-11-21/{both['name']}", True)
    elsewhere.without_torch("from pipeline.__main__ import main\nassert main(['runs']) == 0\n")
    for record in (tmp_path / "store" / "stages" / "pretrain-phase1").glob("*.json"):
        record.write_text("{}")
    done = elsewhere.ask("runs")
    assert "1 damaged record; see python -m pipeline store verify" in done.stderr
    assert len(done.stdout.splitlines()) == 2


@pytest.mark.slow
def test_a_training_of_a_machine_that_was_lost_is_listed_with_its_last_checkpoint(tmp_path: Path) -> None:
    lost = machine(tmp_path / "lost", tmp_path / "store")
    words = ("Pretrain", "--phase", "1", "--Phase1-max-steps", "100000", "--Phase1-lr", "0.125")
    process = lost.start(*words, "--Phase1-ckpt-interval-steps", "5")

    def checkpoints() -> list[dict[str, Any]]:
        records = [read_json(path) for path in (tmp_path / "store" / "leases").glob("pretrain-phase1*.json")]
        return [one for record in records if record for one in record["content"]["checkpoints"]]

    try:
        wait_until(lambda: bool(checkpoints()))
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 75
    finally:
        process.kill()
        process.wait()
    name = checkpoints()[-1]["name"]
    shutil.rmtree(lost.work)
    (found,) = json.loads(lost.ask("runs", "--json").stdout)
    assert (found["state"], found["here"], found["stored"]) == ("unfinished", False, True)
    assert found["steps"] == [{"done": int(name.removeprefix("ckpt_")), "total": 100000}]
    assert found["settings"]["Phase1-lr"] == "0.125"
    assert runs_with(lost, "Phase1-lr=1.25e-1") == 1


def runs_with(chain: Chain, condition: str) -> int:
    return len(json.loads(chain.ask("runs", "--json", "--where", condition).stdout))
