"""What one node concludes from another's files, whatever their clocks say."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest

from common.errors import NodeMissing, UserError
from common.files import utc
from pipeline.launchers.local import NewFailures, await_node_0
from pipeline.tasks.runner import Runner
from stages.directory.attempts import ATTEMPTS, record_failure, recording
from stages.directory.lock import LOCK, hold
from stages.directory.manifest import StartTime, claim
from tests.helpers.chain import wait_until
from tests.pipeline.tasks.test_runner import DONE, Launcher, Stage

#: Seconds by which node 0's clock, and the times of its files, are wrong.
SKEWS = (-7200.0, 7200.0)


def fail(directory: Path, error: str, skew_s: float) -> None:
    record_failure(directory, error)
    there = time.time() + skew_s
    os.utime(directory / ATTEMPTS, (there, there))


def wait(directory: Path, has_failed: NewFailures, timeout_s: float) -> None:
    await_node_0("pretrain", directory, lambda: "not yet", timeout_s, has_failed=has_failed)


@pytest.mark.parametrize("skew_s", SKEWS)
def test_a_failure_of_this_run_is_seen(tmp_path: Path, skew_s: float) -> None:
    has_failed = NewFailures(tmp_path)
    threading.Timer(0.5, fail, (tmp_path, "out of memory", skew_s)).start()
    with pytest.raises(UserError, match="failed on node 0: out of memory"):
        wait(tmp_path, has_failed, 60)


@pytest.mark.parametrize("skew_s", SKEWS)
def test_a_failure_while_this_node_did_its_share_is_seen(tmp_path: Path, skew_s: float) -> None:
    has_failed = NewFailures(tmp_path)
    fail(tmp_path, "out of memory", skew_s)
    with pytest.raises(UserError, match="failed on node 0: out of memory"):
        wait(tmp_path, has_failed, 60)


@pytest.mark.parametrize("skew_s", SKEWS)
def test_a_failure_of_an_earlier_run_is_not_taken_for_this_ones(tmp_path: Path, skew_s: float) -> None:
    fail(tmp_path, "out of memory", skew_s)
    with pytest.raises(NodeMissing):
        wait(tmp_path, NewFailures(tmp_path), 2)


@pytest.mark.parametrize("skew_s", SKEWS)
def test_the_same_failure_again_is_seen(tmp_path: Path, skew_s: float) -> None:
    """Node 0 starts again and fails in the same second with the same words."""
    fail(tmp_path, "out of memory", skew_s)
    has_failed = NewFailures(tmp_path)

    threading.Timer(0.5, fail, (tmp_path, "out of memory", skew_s)).start()
    with pytest.raises(UserError, match="failed on node 0"):
        wait(tmp_path, has_failed, 60)


@pytest.mark.parametrize("skew_s", SKEWS)
@pytest.mark.parametrize("fails", [False, True])
def test_failures_of_a_machine_whose_checkpoint_node_0_fetches_are_none_of_its_own(
    tmp_path: Path, skew_s: float, fails: bool
) -> None:
    """They replace those that were there."""

    def failed_at(ended: float) -> str:
        return json.dumps({"ended": ended, "how": "failed", "is_final": True, "error": "out of memory"}) + "\n"

    there = time.time() + skew_s
    (tmp_path / ATTEMPTS).write_text(failed_at(there - 900) + failed_at(there - 800))
    has_failed = NewFailures(tmp_path)
    with hold(tmp_path):
        (tmp_path / LOCK).write_text(json.dumps({"host": "node-0", "pid": 17, "started": utc(there)}))
        (tmp_path / ATTEMPTS).write_text(failed_at(there - 500))
        assert not has_failed()
        if fails:
            (tmp_path / ATTEMPTS).write_text(failed_at(there - 500) + failed_at(there + 3))
    assert has_failed() == fails


def test_a_command_that_node_0_starts_again_has_not_failed_yet(tmp_path: Path) -> None:
    has_failed = NewFailures(tmp_path)
    with recording(tmp_path) as record:
        record("failed", 70, "RuntimeError: once")
    with pytest.raises(NodeMissing):
        wait(tmp_path, has_failed, 2)


@pytest.mark.parametrize("skew_s", SKEWS)
def test_old_signs_of_life_are_none(tmp_path: Path, skew_s: float) -> None:
    (tmp_path / "stage.log").touch()
    there = time.time() + skew_s
    os.utime(tmp_path / "stage.log", (there, there))
    began = time.monotonic()
    with pytest.raises(NodeMissing):
        wait(tmp_path, NewFailures(tmp_path), 2)
    assert time.monotonic() - began < 30


class TwoNodes(Stage):
    nodes = 2


def follow(tmp_path: Path) -> tuple[TwoNodes, Launcher, threading.Thread]:
    """Node 1, which waits for at most 2 s for a sign of life from node 0."""
    stage, launcher = TwoNodes(tmp_path, restarts=False), Launcher(DONE)
    return stage, launcher, threading.Thread(target=Runner(stage, launcher).follow, args=(1, 2.0), daemon=True)


@pytest.mark.parametrize("skew_s", SKEWS)
def test_a_nodes_share_starts_with_the_command_of_node_0(tmp_path: Path, skew_s: float) -> None:
    """Which waits with the lock held, for another machine's lease, after an earlier start was killed."""
    stage, launcher, node_1 = follow(tmp_path)
    stage.directory.mkdir()
    there = time.time() + skew_s

    def start(at: float) -> None:
        with (stage.directory / ATTEMPTS).open("a") as file:
            file.write(json.dumps({"started": at, "host": "node-0", "pid": 17}) + "\n")

    start(there - 60)
    with hold(stage.directory):
        claim(stage.directory, stage.identity)
        (stage.directory / LOCK).write_text(json.dumps({"host": "node-0", "pid": 17, "started": utc(there)}))
        node_1.start()
        time.sleep(4)
        assert node_1.is_alive()
        assert launcher.starts == 0
        start(there + 4)
        wait_until(lambda: launcher.starts == 1, timeout_s=20)
        stage.finish(StartTime.now())
    node_1.join(20)
    assert not node_1.is_alive()


def test_a_node_has_no_share_in_what_node_0_fetches(tmp_path: Path) -> None:
    stage, launcher, node_1 = follow(tmp_path)
    with hold(stage.directory):
        claim(stage.directory, stage.identity)
        node_1.start()
        time.sleep(1)
        stage.finish(StartTime.now())
    node_1.join(20)
    assert not node_1.is_alive()
    assert launcher.starts == 0
