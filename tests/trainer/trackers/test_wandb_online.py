"""W&B's own client beside real trainings, with a stand-in for W&B's server (`wandb_server`)."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.chain import wait_until
from tests.helpers.support import Workers, options, train
from tests.trainer.trackers.test_trackers import EVERY, STEPS, before_checkpoint, companions, recorded, settings
from tests.trainer.trackers.wandb_server import KEY, OnlineRun, OnlineServer, online_server

pytestmark = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs the extra wandb")


@pytest.fixture
def online() -> Iterator[OnlineServer]:
    with online_server() as server:
        yield server


def given(data: Path, model: Path, out: Path, online: OnlineServer) -> tuple[dict[str, Any], dict[str, str]]:
    """The options of a training, and its environment."""
    env = {"WANDB_BASE_URL": online.url, "WANDB_API_KEY": KEY}
    return settings(data, model, out, trackers="wandb", wandb_mode="online"), env


def the_run(online: OnlineServer) -> OnlineRun | None:
    assert len(online.runs) <= 1
    return next(iter(online.runs.values()), None)


def kill_before_checkpoint(step: int, online: OnlineServer, words: dict[str, Any], env: dict[str, str]) -> None:
    """Train, and SIGKILL the training before it saves `step`, once the server has all that earlier checkpoints hold."""
    workers = Workers(1, "trainer", options(**words), {**env, **before_checkpoint(step)})
    try:
        wait_until(lambda: (run := the_run(online)) is not None and run.steps[-1:] >= [step - EVERY])
        beside = companions(workers.processes[0].pid)
        os.kill(workers.processes[0].pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(beside, timeout=60)
        assert not alive
    finally:
        workers.end()


def test_a_training_that_is_killed_twice_goes_on_as_the_same_run(
    online: OnlineServer, data: Path, model: Path, tmp_path: Path
) -> None:
    words, env = given(data, model, tmp_path / "out", online)
    kill_before_checkpoint(9, online, words, env)
    kill_before_checkpoint(15, online, words, env)
    done = train(env=env, **words)
    assert done.returncode == 0, done.stdout
    assert "note:" not in done.stdout
    run = the_run(online)
    assert run is not None
    assert run.steps == list(range(1, STEPS + 1))
    wanted = recorded(tmp_path / "out")
    assert {name: [(line["_step"], line[name]) for line in run.history] for name in wanted} == wanted
    assert run.config["lr"]["value"] == 4e-4
    assert run.exit_codes == [0], "a killed process says nothing of its end"


def test_a_server_that_refuses_everything_is_said_once_and_gets_all_later(
    online: OnlineServer, data: Path, model: Path, tmp_path: Path
) -> None:
    words, env = given(data, model, tmp_path / "out", online)
    online.is_down = True
    done = train(env=env, **{**words, "tracker_wait": 1})
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("note:") == 1
    assert f"note: not all of {tmp_path / 'out'} has reached wandb" in done.stdout
    online.is_down = False
    done = train(env=env, **words)  # nothing is left to train
    assert done.returncode == 0, done.stdout
    run = the_run(online)
    assert run is not None
    assert run.steps == list(range(1, STEPS + 1))
