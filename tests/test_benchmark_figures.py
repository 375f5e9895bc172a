"""Benchmarks print medians, claim only what holds for what they measured, and refuse what they cannot measure."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from benchmarks import data_wait, scale, train_cpu
from trainer.data.identity import content_identity
from trainer.devices.cpu import CpuDevice


def run(monkeypatch: pytest.MonkeyPatch, name: str, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *words])
    importlib.import_module(f"benchmarks.{name}").main()


@pytest.mark.parametrize(("auto", "claims"), [("autocast", [3.2, 2.3, 1.7]), ("fp32", [None, 2.3, 1.7])])
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
            found.append(content_identity(directory / "data", names, tmp_path, print))
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
