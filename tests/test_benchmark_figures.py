"""Benchmarks print medians, claim only what holds for what they measured, and refuse what they cannot measure."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch

from benchmarks import data_wait, quality, scale, startup, train_cpu, utilization
from benchmarks.faults import recovery
from benchmarks.references import timed
from benchmarks.references.timed import MATRIX_RATE
from trainer.data.identity import content_identity
from trainer.data.reader import Counts
from trainer.devices.cpu import CpuDevice
from trainer.launch.agreement import Agreement
from trainer.launch.preemption import Interruptions
from trainer.parallel.mesh import Mesh


def run(monkeypatch: pytest.MonkeyPatch, name: str, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *words])
    importlib.import_module(f"benchmarks.{name}").main()


@pytest.mark.parametrize(("auto", "claims"), [("autocast", [4, 3, 2]), ("fp32", [None, None, 2])])
def test_nothing_is_claimed_for_auto_without_bf16_instructions(
    auto: str, claims: list[float | None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(CpuDevice, "automatic_precision", lambda device: (auto, ""))
    monkeypatch.setattr(train_cpu, "our_step_times", lambda *args, **given: [1.0] * 4)
    monkeypatch.setattr(train_cpu, "their_step_times", lambda *args, **given: [2.0] * 4)
    run(monkeypatch, "train_cpu", "--pairs=1", "--cores=1")
    said = [line.split("claimed: ")[1].split(" ×")[0] for line in capsys.readouterr().out.splitlines()]
    assert said == ["nothing" if claim is None else f"at least {claim}" for claim in claims]


def test_both_sides_and_the_share_are_medians(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits = iter([0.001, 0.002, 0.006, 0.005])

    def timed(*words: str) -> str:
        directory = Path(words[words.index("benchmarks.references.timed") + 1])
        directory.mkdir()
        step = {"data": next(waits), "wall": 1.0}
        (directory / "0.json").write_text(json.dumps([step] * 5))
        return ""

    monkeypatch.setattr(data_wait, "python", timed)
    run(monkeypatch, "data_wait", "--pairs=4", "--steps=4", "--cores=1", "--workers=1", "--rows=16", "--shards=1")
    said = capsys.readouterr().out
    assert "3.50 ms a step of waiting; a step 1000 ms: 0.35 % (0.1, 0.2, 0.6, 0.5)" in said


@pytest.mark.parametrize("auto", ["autocast", "fp32"])
def test_the_shares_are_those_of_each_work_in_its_own_type(
    auto: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 60 FLOP in a step of 1 s, where the matrix rate is 100, 80 and 120 FLOP/s; a checkpoint costs 6 s in 600."""
    ran = []

    def train(*words: str) -> str:
        given = dict(zip(words[3::2], words[4::2], strict=True))
        hidden = json.loads(Path(given["--model_config"]).read_text())["hidden_size"]
        ran.append((hidden, given["--precision"], os.environ[MATRIX_RATE]))
        pair = (len(ran) - 1) // (3 if auto == "autocast" else 1)
        step, end = {"wall": 1.0, "forward": 0.3, "backward": 0.6, "optimizer": 0.05}, {"save": 6.0}
        for directory in (Path(words[2]), Path(given["--output_dir"])):
            directory.mkdir()
        records = [*[step] * 4, {**end, "matrix_flops_per_s": (100.0, 80.0, 120.0)[pair]}]
        (Path(words[2]) / "0.json").write_text(json.dumps(records))
        (Path(given["--output_dir"]) / "metrics.jsonl").write_text('{"flops_per_s": 30.0, "step_time_s": 2.0}\n')
        return ""

    monkeypatch.setenv(MATRIX_RATE, "")
    monkeypatch.setattr(CpuDevice, "automatic_precision", lambda device: (auto, ""))
    monkeypatch.setattr(utilization, "python", train)
    run(monkeypatch, "utilization", "--steps=4", "--cores=1")
    said = capsys.readouterr().out.splitlines()
    measured = [(256, "autocast", "bfloat16"), (768, "autocast", "bfloat16"), (768, "fp32", "float32")]
    claims = [("at least 50 %", "met"), ("at least 60 %", "met"), ("at least 75 %", "MISSED")]
    if auto == "fp32":
        measured, claims = measured[2:], claims[2:]
    assert ran == 3 * measured
    for share, (least, met) in zip(said[::2], claims, strict=True):
        assert share.endswith(f": 60 % (60, 75, 50); claimed: {least} and at most 100 %: {met}")
    assert all(": 6 % (6, 6, 6); claimed: " in outside for outside in said[1::2])
    assert [outside.split("claimed: ")[1] for outside in said[1::2]] == [
        *["nothing"] * (len(measured) - 1), "at most 2 %: MISSED"
    ]  # fmt: skip


def test_the_matrix_rate_is_of_the_type_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {torch.float32: 1.0, torch.bfloat16: 2.0}
    monkeypatch.setattr(timed, "matrix_flops_per_s", lambda size, times, dtype: rates[dtype])
    for name, rate in (("float32", 1.0), ("bfloat16", 2.0), ("", 0.0)):
        monkeypatch.setenv(MATRIX_RATE, name)
        assert timed.matrix_rate() == rate


def test_a_start_is_compared_with_the_import_beside_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 1, 2 and 1.5 times as long the median is 1.5; the medians of both sides are 4 and 2 s."""
    starts, imports = iter([9.0, 2.0, 4.0, 9.0]), iter([2.0, 2.0, 6.0])
    monkeypatch.setattr(startup, "first_step_s", lambda *directories: next(starts))
    monkeypatch.setattr(startup, "import_torch_s", lambda: next(imports))
    run(monkeypatch, "startup", "--pairs=3", "--cores=1")
    assert "trainer 4 s; import torch alone 2 s: 1.5 × (1, 2, 1.5); claimed: at most 1.25 ×: MISSED" in (
        capsys.readouterr().out
    )


def test_one_kill_that_costs_more_than_a_step_misses_the_claim() -> None:
    for worst, met in ((0.9, "yes"), (1.1, "no")):
        _, again = recovery.results(2, 200, [1.0, 1.0, 1.0], [0.1, worst, 0.2])
        assert (again.value, again.beside, again.met) == (worst, "median 0.2", met)


@pytest.mark.parametrize("changed", ["trainer", "stages", "common", "benchmarks/references", "pipeline"])
def test_a_training_of_other_code_is_not_taken_for_this_one(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quality, "ROOT", tmp_path)
    source = tmp_path / changed / "inner" / "one.py"
    source.parent.mkdir(parents=True)
    source.write_text("rate = 1\n")
    trained, what = iter([quality.Trained(1.0, 2.0, 0.3), quality.Trained(1.0, 2.5, 0.3)]), {"name": "ours", "seed": 1}
    data = quality.WikiText(tmp_path, samples=1, cores=1)
    losses = [data.once(what, lambda: next(trained)).loss for _ in range(2)]
    assert [line.endswith(" (from an earlier run)") for line in capsys.readouterr().out.splitlines()] == [False, True]
    source.write_text("rate = 2\n")
    assert [*losses, data.once(what, lambda: next(trained)).loss] == [2.0, 2.0, 2.0 if changed == "pipeline" else 2.5]


def test_as_many_integers_are_added_as_workers_agree_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    def add(mesh: Mesh, values: list[int]) -> list[int]:
        sent.append(len(values))
        return values

    monkeypatch.setattr(Mesh, "sum_on_host", add)
    agreement = Agreement(Mesh(), Interruptions(tmp_path, is_root=False, watches_spot=False))
    agreement.before_step([1] * len(get_args(Counts)), not_finite=False, save=False)
    assert sent == [scale.AGREED]


@pytest.mark.parametrize(
    ("name", "words", "allowed"), [("workers", ["--cores=3"], "1, 2 or 4"), ("scale", ["memroy"], "memory")]
)
def test_what_cannot_be_measured_is_refused(
    name: str, words: list[str], allowed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, name, *words)
    assert ended.value.code == 2
    assert allowed in capsys.readouterr().err.splitlines()[-1]


def test_the_made_data_set_is_known_by_its_manifest(tmp_path: Path) -> None:
    """Nothing is hashed, so nothing is remembered; and the manifest's hashes are those of the shards."""
    found = []
    for manifest in (True, False):
        with scale.data_set(shards=3, rows=8, manifest=manifest) as (directory, _):
            names = sorted(path.name for path in (directory / "data").glob("*.hdf5"))
            found.append(content_identity(directory / "data", names, tmp_path))
        if manifest:
            assert not list(tmp_path.iterdir())
    assert len(names) == 3
    assert found[0] == found[1]


def test_a_checkpoint_of_a_small_model_is_saved_and_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.checkpoint.ROOT", tmp_path)
    run(monkeypatch, "checkpoint", "--model=debug", "--saves=2")
    stall, memory = capsys.readouterr().out.splitlines()[-2:]
    assert "claimed: at most 1 %: met" in stall
    assert "claimed: at most 1.05 ×" in memory


@pytest.mark.parametrize("auto", ["autocast", "fp32"])
def test_the_embedded_default_is_compared_with_guessing(
    auto: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three seeds, each a chain of its own, with the project's settings whatever the caller's are."""
    losses = iter((4.0, 5.5, 4.2))

    def chain(*words: str, environment: dict[str, str]) -> str:
        assert environment["LUIGI_CONFIG_PATH"].endswith("/luigi.cfg")
        (work, seed) = (words[words.index(name) + 1] for name in ("--Run-work-dir", "--Run-seed"))
        report = Path(work) / f"evaluate-{seed}" / "evaluation.json"
        report.parent.mkdir()
        found = {
            "masked_lm_loss": next(losses),
            "masked_lm_accuracy": 0.3,
            "unigram_loss": 6.2,
            "unigram_accuracy": 0.05,
        }
        report.write_text(json.dumps(found))
        return ""

    monkeypatch.setattr(CpuDevice, "automatic_precision", lambda device: (auto, ""))
    monkeypatch.setattr(quality, "python", chain)
    run(monkeypatch, "quality", "--only-default", "--cores=1")
    accuracy, loss, time = capsys.readouterr().out.splitlines()
    assert "loss 4.200, accuracy 30.0 %, 0 s; by frequency loss 6.200, accuracy 5.0 %: 30 %" in accuracy
    assert accuracy.endswith("claimed: at least 38 %: MISSED")
    assert loss.endswith(": 2 nats less (2.2, 0.7, 2); claimed: at least 2.8 nats less: MISSED")
    assert time.endswith("claimed: at most 300 s: met" if auto == "autocast" else "claimed: nothing")
