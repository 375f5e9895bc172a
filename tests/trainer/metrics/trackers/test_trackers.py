"""Real trainings, shown by MLflow's real server, W&B's real files and TensorBoard: each step once, whatever happens."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import secrets
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.errors import UserError
from common.secrets import Secret
from tests.helpers.chain import wait_until
from tests.helpers.support import Workers, assert_same_bytes, command, metrics, options, train
from tests.trainer.metrics.trackers import readers
from tests.trainer.metrics.trackers.readers import Curves, MlflowServer, board_curves, wandb_runs
from trainer.metrics.trackers.options import TrackerOptions

mlflow_server = readers.mlflow_server
STEPS, EVERY = 20, 3


@pytest.fixture
def server(mlflow_server: MlflowServer) -> Iterator[MlflowServer]:
    if mlflow_server.process is None:
        mlflow_server.start()
    return mlflow_server


def settings(data: Path, model: Path, out: Path, **changes: Any) -> dict[str, Any]:
    return {
        "data_dir": data, "model_config": model, "output_dir": out, "precision": "fp32", "device": "cpu",
        "batch_size": 4, "grad_accum_usteps": 2, "warmup_steps": 2, "max_pred_len": 5, "max_steps": STEPS,
        "resume_ckpt": True, "ckpt_interval_steps": EVERY, "tracker_project": out.name, "wandb_mode": "offline",
        "tracker_wait": 120, **changes,
    }  # fmt: skip


def recorded(out: Path) -> Curves:
    """The curves of metrics.jsonl, which tests/trainer/metrics/test_results.py checks against what was trained."""
    curves: Curves = {}
    for record in metrics(out):
        for name, value in record.items():
            if name not in ("step", "time", "diagnoses"):
                curves.setdefault(name, []).append((record["step"], value))
    return curves


def companions(process: int) -> list[psutil.Process]:
    """Descendants of `process` that send to trackers, including those of their libraries."""
    below = psutil.Process(process).children(recursive=True)
    return [one for one in below if {"trainer.metrics.sending", "wandb-core"} & {Path(w).name for w in one.cmdline()}]


def before_checkpoint(step: int) -> dict[str, str]:
    """The environment of a training that waits once it has recorded `step`, before it saves that step."""
    return {"FAILPOINT": f"recorded:{step}", "FAILPOINT_ACTION": "wait 300"}


def kill_before_checkpoint(
    step: int, given: dict[str, Any], env: dict[str, str], *, last_sent: Callable[[], int], trackers: int
) -> None:
    """Train, and SIGKILL the training there, once `last_sent` is a step that earlier checkpoints hold. There must be at
    least `trackers` processes that send."""
    workers = Workers(1, "trainer", options(**given), {**env, **before_checkpoint(step)})
    try:
        wait_until(lambda: last_sent() >= step - EVERY)
        beside = companions(workers.processes[0].pid)
        assert len(beside) >= trackers
        os.kill(workers.processes[0].pid, signal.SIGKILL)
        # W&B's own process checks every few seconds whether ours is still there.
        _, alive = psutil.wait_procs(beside, timeout=60)
        assert not alive
    finally:
        workers.end()


@pytest.mark.slow
def test_a_training_that_is_killed_twice_is_one_run_with_each_step_once(
    server: MlflowServer, data: Path, model: Path, tmp_path: Path
) -> None:
    """After each kill, three steps that were recorded are trained again."""
    pytest.importorskip("wandb", reason="needs the extra wandb")
    out = tmp_path / f"killed-{secrets.token_hex(4)}"
    given = settings(data, model, out, trackers="tensorboard,mlflow,wandb", mlflow_uri=server.uri)
    sent = functools.partial(server.last_step, given["tracker_project"])
    kill_before_checkpoint(9, given, {}, last_sent=sent, trackers=2)
    assert metrics(out)[-1]["step"] == 9
    kill_before_checkpoint(15, given, {}, last_sent=sent, trackers=2)
    done = train(**given)
    assert done.returncode == 0, done.stdout
    assert "note:" not in done.stdout
    wanted = recorded(out)
    assert [step for step, _ in wanted["loss"]] == list(range(1, STEPS + 1))

    (run,) = server.runs(out.name)
    assert (run.status, run.name, run.curves) == ("FINISHED", out.name, wanted)
    assert (run.parameters["lr"], run.parameters["optimizer"]) == ("0.0004", "AdamW")
    assert run.parameters["device"].startswith("cpu")
    (offline,) = wandb_runs(out)
    assert (offline.status, offline.name, offline.curves) == ("finished", out.name, wanted)
    assert offline.parameters["lr"] == 4e-4
    assert offline.parameters["hidden_size"] == 32
    for name, points in board_curves(out).items():  # single precision, and of steps in quick succession only one
        steps = [step for step, _ in points]
        assert steps == sorted(set(steps)), name
        assert dict(points) == pytest.approx({step: dict(wanted[name])[step] for step in steps}, rel=1e-6), name


@pytest.mark.slow
def test_a_server_that_comes_and_goes_gets_everything(
    server: MlflowServer, data: Path, model: Path, tmp_path: Path
) -> None:
    """Down when training begins, up, down again at its end, which waits for it no longer than it was told to."""
    out = tmp_path / f"away-{secrets.token_hex(4)}"
    given = settings(data, model, out, trackers="mlflow", mlflow_uri=server.uri, tracker_wait=1)
    server.stop()
    workers = Workers(1, "trainer", options(**given), before_checkpoint(9))
    try:
        wait_until(lambda: "note: mlflow: " in workers.said())
        server.start()
        wait_until(lambda: server.last_step(out.name) == 6)
    finally:
        workers.end()
    server.stop()
    done = train(**given)
    assert done.returncode == 0, done.stdout
    assert f"note: not all of {out} has reached mlflow" in done.stdout
    assert "Traceback" not in done.stdout
    server.start()
    assert server.last_step(out.name) == 6
    done = train(**{**given, "tracker_wait": 120})  # nothing is left to train
    assert done.returncode == 0, done.stdout
    (run,) = server.runs(out.name)
    assert (run.status, run.curves) == ("FINISHED", recorded(out))


def test_a_tracker_that_never_answers_changes_nothing_and_is_not_waited_for(
    data: Path, model: Path, tmp_path: Path
) -> None:
    """Connections are accepted and never answered."""
    pytest.importorskip("mlflow", reason="needs the extra mlflow")
    plain = train(**settings(data, model, tmp_path / "plain", trackers=""))
    assert plain.returncode == 0, plain.stdout
    assert not (tmp_path / "plain" / "tensorboard").exists()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        out = tmp_path / "silent"
        done = train(**settings(data, model, out, trackers="tensorboard,mlflow", mlflow_uri=uri, tracker_wait=0.5))
    assert done.returncode == 0, done.stdout
    assert f"note: not all of {out} has reached mlflow" in done.stdout
    assert_same_bytes(out / "checkpoints" / f"ckpt_{STEPS}", tmp_path / "plain" / "checkpoints" / f"ckpt_{STEPS}")


@pytest.mark.slow
def test_the_other_workers_wait_for_a_root_that_waits_for_a_tracker(data: Path, model: Path, tmp_path: Path) -> None:
    """Longer than their collectives may take."""
    pytest.importorskip("mlflow", reason="needs the extra mlflow")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        given = settings(data, model, tmp_path / "out", trackers="mlflow", mlflow_uri=uri, tracker_wait=20, max_steps=3)
        done = train(2, **given, collective_timeout=10)
    assert done.returncode == 0, done.stdout
    assert f"note: not all of {tmp_path / 'out'} has reached mlflow" in done.stdout


@pytest.mark.slow
def test_rolling_back_begins_another_run_and_leaves_the_first(
    server: MlflowServer, data: Path, model: Path, tmp_path: Path
) -> None:
    out = tmp_path / f"back-{secrets.token_hex(4)}"
    given = settings(data, model, out, trackers="mlflow", mlflow_uri=server.uri, num_ckpts_to_keep=-1)
    assert train(**given, steps_this_run=12).returncode == 0
    first = recorded(out)
    done = train(**{**given, "lr": 1e-3}, resume_step=6, allow_changes="lr")
    assert done.returncode == 0, done.stdout
    runs = {run.name: run for run in server.runs(out.name)}
    assert runs.keys() == {out.name, f"{out.name}-1"}
    assert runs[out.name].curves == first
    assert runs[f"{out.name}-1"].curves == recorded(out)
    assert runs[f"{out.name}-1"].parameters["lr"] == "0.001"
    # Again, after what was set aside has been removed: it gets the same name.
    second = recorded(out)
    shutil.rmtree(out / "checkpoints" / "abandoned-1")
    done = train(**{**given, "lr": 5e-4}, resume_step=9, allow_changes="lr")
    assert done.returncode == 0, done.stdout
    assert (out / "checkpoints" / "abandoned-1").is_dir()
    runs = {run.name: run for run in server.runs(out.name)}
    assert runs.keys() == {out.name, f"{out.name}-1", f"{out.name}-2"}
    assert runs[f"{out.name}-1"].curves == second
    assert runs[f"{out.name}-2"].curves == recorded(out)


@pytest.mark.slow
def test_of_several_workers_the_root_alone_sends(server: MlflowServer, data: Path, model: Path, tmp_path: Path) -> None:
    out = tmp_path / f"two-{secrets.token_hex(4)}"
    done = train(2, **settings(data, model, out, trackers="mlflow", mlflow_uri=server.uri, max_steps=6))
    assert done.returncode == 0, done.stdout
    (run,) = server.runs(out.name)
    assert run.curves == recorded(out)
    assert run.parameters["data_parallel_size"] == "2"


@pytest.mark.slow
def test_no_key_or_password_of_a_tracker_is_written_or_said(
    server: MlflowServer, data: Path, model: Path, tmp_path: Path
) -> None:
    """Nor passed on the command line of the processes that have it."""
    pytest.importorskip("wandb", reason="needs the extra wandb")
    canaries = {name: f"K4n{secrets.token_hex(20)}" for name in ("key", "password", "token")}
    out = tmp_path / f"secret-{secrets.token_hex(4)}"
    uri = server.uri.replace("//", f"//me:{canaries['password']}@")
    given = settings(data, model, out, trackers="mlflow,wandb", mlflow_uri=uri)
    seen: list[str] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.05):
            for process in psutil.process_iter(["cmdline"]):
                words = " ".join(process.info["cmdline"] or [])
                if "trainer.metrics.sending" in words and out.name in words:
                    seen.append(words)

    watch = threading.Thread(target=look)
    watch.start()
    try:
        env = {"WANDB_API_KEY": canaries["key"], "MLFLOW_TRACKING_TOKEN": canaries["token"]}
        done = train(env=env, **given)
    finally:
        over.set()
        watch.join()
    assert done.returncode == 0, done.stdout
    (run,) = server.runs(out.name)
    assert run.curves == recorded(out)
    assert seen
    files = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert any(path.suffix == ".wandb" for path in files)
    for name, canary in canaries.items():
        assert canary not in done.stdout, name
        assert not [words for words in seen if canary in words], name
        assert not [path for path, content in files.items() if canary.encode() in content], name


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"trackers": "mlfow"},
            "names = mlfow: mlfow is not a tracker (commas separate several); did you mean mlflow?",
        ),
        (
            {"trackers": "wandb, x"},
            "names = wandb, x: x is not a tracker (commas separate several); allowed: tensorboard,",
        ),
        ({"trackers": "mlflow"}, "names = mlflow: mlflow needs an address; give mlflow_uri"),
        (
            {"trackers": "mlflow", "mlflow_uri": "localhost:5000"},
            "mlflow_uri = localhost:5000 is a host without a scheme",
        ),
        (
            {"trackers": "mlflow", "mlflow_uri": "http://[x"},
            "mlflow_uri = http://[x is not an address: its host is malformed",
        ),
        ({"trackers": "wandb", "tracker_project": "a/b"}, "project = a/b is not a name W&B accepts"),
        ({"trackers": "wandb", "tracker_project": ""}, "project = : wandb needs the name of a project; give one"),
        ({"trackers": "wandb", "wandb_mode": "off"}, "--wandb_mode is off; allowed: online, offline"),
        ({"trackers": "wandb", "tracker_wait": -1}, "--tracker_wait is -1.0; allowed: a number 0 or more"),
    ],
)
def test_a_bad_tracker_is_one_line(given: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    done = command("-m", "trainer", *options(**given))
    assert done.returncode == 1
    assert f"error: {said}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_a_missing_library_is_one_line_that_names_its_extra(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It may be installed here: an import system that does not find it stands in for a machine without it."""
    hidden = (
        f"import importlib.util as util\nfind = util.find_spec\n"
        f"util.find_spec = lambda name, *rest: None if name == {name!r} else find(name, *rest)\n"
    )
    (tmp_path / "sitecustomize.py").write_text(hidden)
    env = {"PYTHONPATH": str(tmp_path), "MLFLOW_TRACKING_URI": "http://127.0.0.1:1"}
    done = command("-m", "trainer", "--trackers", name, env=env)
    assert done.returncode == 1
    assert f"names = {name}: {name} needs a library that is not installed; install the extra" in done.stderr
    assert f"'bert-pretraining-pipeline[{name}]'" in done.stderr


@pytest.mark.parametrize(("scheme", "is_refused"), [("sqlite", True), ("postgresql+psycopg2", True), ("http", False)])
def test_a_database_needs_the_whole_of_mlflow(scheme: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has only the extra, simulated by an import system that does not find what it lacks."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sqlalchemy" else found("json"))
    options = TrackerOptions(names="mlflow", mlflow_uri=Secret.address(f"{scheme}:///absolute/path.db"))
    with pytest.raises(UserError, match="is a database") if is_refused else contextlib.nullcontext():
        options.require_installed()


def test_an_address_matters_only_to_who_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor may its password be taken for a part of its host."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://[x")
    TrackerOptions().require_installed()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:a[b@host")
    assert TrackerOptions(names="mlflow").chosen == ("mlflow",)


def test_what_is_not_there_is_not_imported(data: Path, model: Path, tmp_path: Path) -> None:
    """Neither library is loaded into the process that trains, whichever trackers are chosen."""
    program = (
        "import sys, trainer.options, trainer.rollback, trainer.metrics.sending\n"
        "assert not {'mlflow', 'wandb'} & set(sys.modules)"
    )
    assert command("-c", program).returncode == 0


def test_an_unusable_record_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "trackers.json").write_text(json.dumps({"base": "x"}))
    done = command("-m", "trainer.metrics.sending", "wandb", str(tmp_path))
    assert done.returncode == 1
    assert f"error: {tmp_path} has no usable trackers.json" in done.stderr
