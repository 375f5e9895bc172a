"""What one node makes of another's files, whatever their clocks say."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from common.errors import NodeMissing, UserError
from pipeline.launchers.local import await_node_0, failure_mark
from stages.directory.manifest import FAILURE, record_failure

#: Seconds by which node 0's clock, and the times of its files, are wrong.
SKEWS = (-7200.0, 7200.0)


def fail(directory: Path, error: str, skew_s: float) -> None:
    record_failure(directory, error)
    there = time.time() + skew_s
    os.utime(directory / FAILURE, (there, there))


def wait(directory: Path, failed_before: object, timeout_s: float) -> None:
    await_node_0("pretrain", directory, lambda: "not yet", timeout_s, failed_before=failed_before)


@pytest.mark.parametrize("skew_s", SKEWS)
def test_a_failure_of_this_run_is_seen(tmp_path: Path, skew_s: float) -> None:
    before = failure_mark(tmp_path)
    threading.Timer(0.5, fail, (tmp_path, "out of memory", skew_s)).start()
    with pytest.raises(UserError, match="failed on node 0: out of memory"):
        wait(tmp_path, before, 60)


@pytest.mark.parametrize("skew_s", SKEWS)
def test_a_failure_while_this_node_did_its_share_is_seen(tmp_path: Path, skew_s: float) -> None:
    before = failure_mark(tmp_path)
    fail(tmp_path, "out of memory", skew_s)
    with pytest.raises(UserError, match="failed on node 0: out of memory"):
        wait(tmp_path, before, 60)


@pytest.mark.parametrize("skew_s", SKEWS)
def test_a_failure_of_an_earlier_run_is_not_taken_for_this_ones(tmp_path: Path, skew_s: float) -> None:
    fail(tmp_path, "out of memory", skew_s)
    with pytest.raises(NodeMissing):
        wait(tmp_path, failure_mark(tmp_path), 2)


@pytest.mark.parametrize("skew_s", SKEWS)
def test_the_same_failure_again_is_seen(tmp_path: Path, skew_s: float) -> None:
    """Node 0 takes the old note away when it starts, and fails in the same second with the same words."""
    fail(tmp_path, "out of memory", skew_s)
    before = failure_mark(tmp_path)

    def again() -> None:
        (tmp_path / FAILURE).unlink()
        time.sleep(1.5)
        fail(tmp_path, "out of memory", skew_s)

    threading.Timer(0.5, again).start()
    with pytest.raises(UserError, match="failed on node 0"):
        wait(tmp_path, before, 60)


@pytest.mark.parametrize("skew_s", SKEWS)
def test_old_signs_of_life_are_none(tmp_path: Path, skew_s: float) -> None:
    (tmp_path / "stage.log").touch()
    there = time.time() + skew_s
    os.utime(tmp_path / "stage.log", (there, there))
    began = time.monotonic()
    with pytest.raises(NodeMissing):
        wait(tmp_path, None, 2)
    assert time.monotonic() - began < 30
