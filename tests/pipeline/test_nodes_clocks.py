"""What one node concludes from another's files, whatever their clocks say."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from common.errors import NodeMissing, UserError
from pipeline.launchers.local import await_node_0
from stages.directory.attempts import ATTEMPTS, failures, record_failure, recording

#: Seconds by which node 0's clock, and the times of its files, are wrong.
SKEWS = (-7200.0, 7200.0)


def fail(directory: Path, error: str, skew_s: float) -> None:
    record_failure(directory, error)
    there = time.time() + skew_s
    os.utime(directory / ATTEMPTS, (there, there))


def wait(directory: Path, failures_before: int, timeout_s: float) -> None:
    await_node_0("pretrain", directory, lambda: "not yet", timeout_s, failures_before=failures_before)


@pytest.mark.parametrize("skew_s", SKEWS)
def test_a_failure_of_this_run_is_seen(tmp_path: Path, skew_s: float) -> None:
    before = failures(tmp_path)
    threading.Timer(0.5, fail, (tmp_path, "out of memory", skew_s)).start()
    with pytest.raises(UserError, match="failed on node 0: out of memory"):
        wait(tmp_path, before, 60)


@pytest.mark.parametrize("skew_s", SKEWS)
def test_a_failure_while_this_node_did_its_share_is_seen(tmp_path: Path, skew_s: float) -> None:
    before = failures(tmp_path)
    fail(tmp_path, "out of memory", skew_s)
    with pytest.raises(UserError, match="failed on node 0: out of memory"):
        wait(tmp_path, before, 60)


@pytest.mark.parametrize("skew_s", SKEWS)
def test_a_failure_of_an_earlier_run_is_not_taken_for_this_ones(tmp_path: Path, skew_s: float) -> None:
    fail(tmp_path, "out of memory", skew_s)
    with pytest.raises(NodeMissing):
        wait(tmp_path, failures(tmp_path), 2)


@pytest.mark.parametrize("skew_s", SKEWS)
def test_the_same_failure_again_is_seen(tmp_path: Path, skew_s: float) -> None:
    """Node 0 starts again and fails in the same second with the same words."""
    fail(tmp_path, "out of memory", skew_s)
    before = failures(tmp_path)

    threading.Timer(0.5, fail, (tmp_path, "out of memory", skew_s)).start()
    with pytest.raises(UserError, match="failed on node 0"):
        wait(tmp_path, before, 60)


def test_a_command_that_node_0_starts_again_has_not_failed_yet(tmp_path: Path) -> None:
    before = failures(tmp_path)
    with recording(tmp_path) as record:
        record("failed", 70, "RuntimeError: once")
    with pytest.raises(NodeMissing):
        wait(tmp_path, before, 2)


@pytest.mark.parametrize("skew_s", SKEWS)
def test_old_signs_of_life_are_none(tmp_path: Path, skew_s: float) -> None:
    (tmp_path / "stage.log").touch()
    there = time.time() + skew_s
    os.utime(tmp_path / "stage.log", (there, there))
    began = time.monotonic()
    with pytest.raises(NodeMissing):
        wait(tmp_path, 0, 2)
    assert time.monotonic() - began < 30
