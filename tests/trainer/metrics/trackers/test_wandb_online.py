"""W&B's own client beside real trainings, with a stand-in for W&B's server (`wandb_server`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.support import train
from tests.trainer.metrics.trackers.test_trackers import STEPS, kill_before_checkpoint, recorded, settings
from tests.trainer.metrics.trackers.wandb_server import KEY, OnlineRun, OnlineServer, online_server

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


def last_step(online: OnlineServer) -> int:
    run = the_run(online)
    return run.steps[-1] if run is not None and run.steps else -1


@pytest.mark.slow
def test_a_training_that_is_killed_twice_goes_on_as_the_same_run(
    online: OnlineServer, data: Path, model: Path, tmp_path: Path
) -> None:
    words, env = given(data, model, tmp_path / "out", online)
    for step in (9, 15):
        kill_before_checkpoint(step, words, env, last_sent=lambda: last_step(online), trackers=1)
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


@pytest.mark.slow
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
