"""A resumed run is the same run: what determines the result, including the data's content, changes only on request."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common import hashing
from common.errors import CheckpointError
from common.options import fields_of
from stages.directory.manifest import Identity, Output, StartTime, finish
from tests.helpers.checkpoints import snapshot
from tests.helpers.support import (
    assert_one_line_error,
    losses,
    train,
    write_dataset,
)
from trainer.checkpoint.format import write_manifest
from trainer.checkpoint.resume_point import ResumePoint
from trainer.config import CHANGEABLE, TrainConfig
from trainer.data.identity import CACHE, content_identity
from trainer.optim.select import takes_over
from trainer.precision import Precision
from trainer.resume import initial_state

GIVEN: dict[str, Any] = {
    "batch_size": 4, "grad_accum_usteps": 4, "warmup_steps": 2, "max_pred_len": 5, "device": "cpu", "max_steps": 8,
    "ckpt_interval_steps": 0, "precision": "fp32",
}  # fmt: skip
CHANGES = {
    "lr": 1e-3, "schedule": "constant", "warmup_steps": 3, "max_steps": 9, "weight_decay": 0.02, "max_grad_norm": 0.5,
    "seed": 1, "optimizer": "LAMB", "precision": "autocast",
}  # fmt: skip


@pytest.fixture(scope="module")
def stopped(data: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 steps that was stopped after 4."""
    out = tmp_path_factory.mktemp("stopped")
    done = train(data_dir=data, model_config=model, output_dir=out, steps_this_run=4, **GIVEN)
    assert done.returncode == 0, done.stdout
    return out


def state_in(checkpoint: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((checkpoint / "state.json").read_text())
    return state


def test_every_field_is_an_option_that_says_whether_it_decides() -> None:
    assert list(fields_of(TrainConfig)) == [field.name for field in dataclasses.fields(TrainConfig)]
    assert {"lr", "schedule", "micro_batch_size"} <= set(CHANGEABLE)
    assert not {"output_dir", "device", "ckpt_interval_steps", "phase"} & set(CHANGEABLE)


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_setting_is_refused_with_its_name(
    stopped: Path, data: Path, model: Path, tmp_path: Path, name: str
) -> None:
    out = shutil.copytree(stopped, tmp_path / "out")
    given = {**GIVEN, "data_dir": data, "model_config": model, "output_dir": out, "resume_ckpt": True}
    before = state_in(out / "checkpoints" / "ckpt_4")
    old = {**before, **before["settings"]}[name]
    refused = train(**{**given, name: CHANGES[name]})
    assert_one_line_error(refused, f"{name} = {old}, this run has {CHANGES[name]}", f"--allow_changes {name}")
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["ckpt_4"]


def test_dropout_and_the_micro_batch_that_decides_its_draws(
    stopped: Path, data: Path, model: Path, tmp_path: Path
) -> None:
    given = {**GIVEN, "data_dir": data, "model_config": model, "output_dir": stopped, "resume_ckpt": True}
    done = train(**given, disable_dropout=True)
    both = "hidden_dropout_prob = 0.1, this run has 0.0; attention_probs_dropout_prob = 0.1, this run has 0.0"
    assert_one_line_error(done, both)
    done = train(**{**given, "batch_size": 8, "grad_accum_usteps": 2})
    assert_one_line_error(done, "micro_batch_size = 4, this run has 8")
    assert_one_line_error(train(**given, allow_changes="phase"), "--allow_changes is phase; allowed", "lr")


def test_an_allowed_change_is_recorded_and_holds_from_there(
    stopped: Path, data: Path, model: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(stopped, tmp_path / "out")
    given = {**GIVEN, "data_dir": data, "model_config": model, "output_dir": out, "resume_ckpt": True}
    done = train(**{**given, "lr": 1e-3, "allow_changes": "lr", "steps_this_run": 6})
    assert done.returncode == 0, done.stdout
    assert "from step 4 on: lr 0.0004 → 0.001, as allowed" in done.stdout
    wanted = [{"step": 4, "name": "lr", "old": 4e-4, "new": 1e-3}]
    assert state_in(out / "checkpoints" / "ckpt_6")["changes"] == wanted
    assert_one_line_error(train(**given), "ckpt_6", "lr = 0.001, this run has 0.0004")
    assert train(**{**given, "lr": 1e-3}).returncode == 0
    assert state_in(out / "checkpoints" / "ckpt_8")["changes"] == wanted
    assert json.loads((out / "results.json").read_text())["changes"] == wanted


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({"lr": 1e-3}, [1, 9]),
        ({"global_batch_size": 32}, [1]),
        ({"batch_ramp_steps": 6}, [1]),
        ({"data": "other"}, [1]),
        ({"seed": 1}, [1]),
    ],
)
def test_batches_ahead_that_were_left_out_stay_so_only_while_they_hold_the_same_samples(
    change: dict[str, Any], kept: list[int]
) -> None:
    """Of the batches before the checkpoint they tell which batch is next; this run's own mean its own samples."""
    settings = {"lr": 4e-4, "batch_ramp_steps": 0, "batch_ramp_parts": 2}
    other = dataclasses.replace(snapshot(5).state, settings=settings, skipped=[1, 9])
    own = {name: value for name, value in change.items() if name in ("global_batch_size", "data", "seed")}
    mine = dataclasses.replace(other, **own, step=0, skipped=[7], settings={**settings, **change})
    resumed = mine.resumed(other, Path("ckpt_5"), allowed=list(change))
    assert resumed.skipped == sorted([*kept, 7])
    assert resumed.step == 5


def test_the_tutorial_scripts_results_are_no_place_for_a_new_training(data: Path, model: Path, tmp_path: Path) -> None:
    """Resumed before its first checkpoint it would be refused too."""
    (tmp_path / "ckpt_7032.pt").touch()
    done = train(**GIVEN, data_dir=data, model_config=model, output_dir=tmp_path)
    assert_one_line_error(done, "ckpt_7032.pt is a checkpoint of the tutorial's script", "give another --output_dir")


def test_pairs_of_segments_need_a_model_with_two(data: Path, model: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(model.read_text()), "type_vocab_size": 1}))
    done = train(**GIVEN, data_dir=data, model_config=config, output_dir=tmp_path / "out")
    assert_one_line_error(done, "type_vocab_size is 1, but the shards in", "give a model with 2")


def test_a_checkpoint_of_an_earlier_version_is_refused_with_what_to_do(
    stopped: Path, data: Path, model: Path, tmp_path: Path
) -> None:
    """Earlier versions recorded no settings, and drew samples and random numbers in another order."""
    out = shutil.copytree(stopped, tmp_path / "out")
    checkpoint = out / "checkpoints" / "ckpt_4"
    state = {**state_in(checkpoint), "order_version": 1}
    for name in ("settings", "changes", "skipped", "origin"):
        del state[name]
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    files = [entry for entry in manifest["files"] if entry["path"] != "state.json"]
    write_manifest(checkpoint, manifest["step"], state, files)
    done = train(**GIVEN, data_dir=data, model_config=model, output_dir=out, resume_ckpt=True)
    assert_one_line_error(done, "order_version = 1", "finish the run with it", "start anew in another output directory")


def change_a_label(path: Path) -> None:
    """Different content of the same shape and size, with a new time stamp."""
    import h5py

    stat = path.stat()
    with h5py.File(path, "r+") as file:
        file["next_sentence_labels"][0] ^= 1
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))


def replace_by_an_older_file(path: Path) -> None:
    """Different content of the same shape, size and modification time, as `mv`, `cp -p`, rsync and tar leave it."""
    stat, other = path.stat(), path.with_name("other")
    shutil.copy(path, other)
    change_a_label(other)
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    os.replace(other, path)


@pytest.mark.parametrize(
    ("workers", "is_stage", "alter"),
    [(1, False, change_a_label), (2, False, change_a_label), (1, True, replace_by_an_older_file)],
)
def test_other_contents_of_the_same_shape_are_another_data_set(
    model: Path, tmp_path: Path, workers: int, is_stage: bool, alter: Callable[[Path], None]
) -> None:
    data = write_dataset(tmp_path / "data", [37, 40])
    if is_stage:
        make_stage(data)
    out = tmp_path / "out"
    given = {**GIVEN, "data_dir": data, "model_config": model, "output_dir": out, "resume_ckpt": True}
    given["grad_accum_usteps"] = 4 // workers
    assert train(workers, **{**given, "steps_this_run": 4}).returncode == 0
    alter(data / "synthetic_training_1.hdf5")
    done = train(workers, **given)
    assert done.returncode != 0, done.stdout
    assert "data = content:" in done.stdout
    assert "--allow_changes data" in done.stdout
    done = train(workers, **{**given, "allow_changes": "data"})
    assert done.returncode == 0, done.stdout
    (change,) = json.loads((out / "results.json").read_text())["changes"]
    assert (change["step"], change["name"]) == (4, "data")
    assert len(losses(out)) == 8


def make_stage(directory: Path) -> list[str]:
    """Mark a directory of shards as finished, as the stages do."""
    identity = Identity("shard_dataset", 1)
    record = [Output.of(directory, path) for path in sorted(directory.glob("*.hdf5"))]
    finish(directory, identity, record, {}, start=StartTime.now())
    return [output.path for output in record]


@pytest.fixture
def a_file_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clock, which stamps the files, is ten minutes ahead: its new files count as settled."""
    clock = SimpleNamespace(time_ns=lambda: time.time_ns() - 600 * 10**9, monotonic=time.monotonic)
    monkeypatch.setattr(hashing, "time", clock)


def test_the_identity_is_the_same_wherever_the_hashes_come_from(tmp_path: Path, a_file_server: None) -> None:
    """Computed, cached, from the manifest, elsewhere: sha256 of names and sha256 sums, by hashlib alone."""
    data = write_dataset(tmp_path / "data", [11, 12, 13])
    names = sorted(path.name for path in data.iterdir())
    sums = [[name, hashlib.sha256((data / name).read_bytes()).hexdigest()] for name in names]
    wanted = "content:" + hashlib.sha256(json.dumps(sums).encode()).hexdigest()
    assert content_identity(data, names, tmp_path / "cache") == wanted
    assert len(json.loads((tmp_path / "cache" / CACHE).read_text())) == 3
    assert content_identity(data, names, tmp_path / "cache") == wanted
    made = shutil.copytree(data, tmp_path / "made")
    make_stage(made)
    assert content_identity(made, names, tmp_path / "unused") == wanted
    assert not (tmp_path / "unused").exists()


def test_the_manifest_and_the_memory_are_believed_only_of_files_as_they_were(tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "data", [11, 12])
    names = make_stage(data)
    first = content_identity(data, names, tmp_path / "cache")
    time.sleep(0.02)
    path = data / names[0]
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    second = content_identity(data, names, tmp_path / "cache")
    assert second != first
    os.utime(path, (1e9, 1e9))
    (data / "manifest.json").unlink()
    assert content_identity(data, names, tmp_path / "cache") == second
    path.write_bytes(content)
    assert content_identity(data, names, tmp_path / "cache") == first


@pytest.mark.parametrize("is_stage", [False, True])
def test_an_older_file_in_a_files_place_is_not_believed(tmp_path: Path, is_stage: bool, a_file_server: None) -> None:
    data = write_dataset(tmp_path / "data", [11, 12])
    names = make_stage(data) if is_stage else sorted(path.name for path in data.iterdir())
    first = content_identity(data, names, tmp_path / "cache")
    assert (tmp_path / "cache" / CACHE).exists() != is_stage
    time.sleep(0.02)
    replace_by_an_older_file(data / names[0])
    assert content_identity(data, names, tmp_path / "cache") != first


@pytest.mark.parametrize(
    "outputs", [None, 1, "x", {"path": "a"}, [["a"]], [{"path": ["a"]}], [{"path": "synthetic_training_0.hdf5"}]]
)
def test_another_tools_manifest_says_nothing(tmp_path: Path, outputs: Any) -> None:
    data = write_dataset(tmp_path / "data", [11])
    names = [path.name for path in data.iterdir()]
    assert names == ["synthetic_training_0.hdf5"]
    wanted = content_identity(data, names, tmp_path / "cache")
    (data / "manifest.json").write_text(json.dumps({"outputs": outputs}))
    assert content_identity(data, names, tmp_path / "other") == wanted


@pytest.mark.parametrize(
    ("old", "new"), [("AdamW", "Muon"), ("LAMB", "Muon"), ("Muon", "AdamW"), ("SGD", "AdamW"), ("of a plugin", "LAMB")]
)
def test_an_optimizer_with_another_state_is_refused_before_anything_is_loaded(
    tmp_path: Path, old: str, new: str
) -> None:
    """Even if the change is allowed; without a model, a device or the checkpoint's files."""
    start = ResumePoint(tmp_path, dataclasses.replace(snapshot().state, optimizer=old), weights_only=False)
    config = TrainConfig(optimizer=new, allow_changes=("optimizer",))
    run: Any = SimpleNamespace(config=config, workload=None, mesh=None)
    said = f"holds the state of optimizer {old}, with which {new} cannot continue; keep {old}, or .* --output_dir"
    with pytest.raises(CheckpointError, match=said):
        initial_state(run, start, Precision("fp32"), [])


def test_an_optimizer_takes_over_the_same_state_or_none() -> None:
    moments = {"AdamW", "AdamW_FP32OptimParams", "AdamW_FP32ParamsCopy", "LAMB"}
    known = {*moments, "Muon", "SGD"}
    found = {name: {other for other in known if takes_over(name, other)} for name in known}
    assert found == {**dict.fromkeys(moments, moments), "Muon": {"Muon"}, "SGD": known}
