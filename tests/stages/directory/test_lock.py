"""One stage, one runner: the lock on a stage directory, between real processes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from common.errors import LockHeld
from stages.directory.lock import JOB, LOCK, hold, is_held
from tests.helpers.support import ROOT

HOLDER = """
import subprocess, sys
from pathlib import Path
from stages.directory.lock import hold

with hold(Path(sys.argv[1])) as fd:
    if sys.argv[2:]:  # a child with the lock, which outlives this process
        subprocess.Popen(["sleep", sys.argv[2]], pass_fds=[fd])
    print("held", flush=True)
    sys.stdin.read()
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process that holds the lock of a directory; returns once it does."""
    started = []

    def run(*words: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, *map(str, words)], cwd=ROOT, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )  # fmt: skip
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def test_a_second_runner_is_told_who_the_first_is(start: Start, tmp_path: Path) -> None:
    first = start(tmp_path)
    assert is_held(tmp_path)
    with pytest.raises(LockHeld, match=f"is being made by process {first.pid} on ") as refused, hold(tmp_path):
        pass
    assert json.loads((tmp_path / LOCK).read_text())["started"] in str(refused.value)
    first.communicate()
    assert not is_held(tmp_path)
    with hold(tmp_path):
        assert is_held(tmp_path)
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    assert not is_held(tmp_path)


def test_a_lock_that_is_removed_with_its_directory_is_taken_anew(start: Start, tmp_path: Path) -> None:
    """A removal ends while another process waits for the lock: the file that it waits for has no name any more."""
    stage = tmp_path / "stage"
    first = start(stage, 600)
    (orphan,) = psutil.Process(first.pid).children()
    first.kill()
    first.wait()

    def remove() -> None:
        shutil.rmtree(stage)
        orphan.kill()

    removal = threading.Timer(0.3, remove)
    removal.start()
    with hold(stage):
        removal.join()
        assert is_held(stage)


def test_a_killed_holder_whose_child_is_about_to_end_is_waited_for(start: Start, tmp_path: Path) -> None:
    """The child holds the lock, too; only its end frees it."""
    first = start(tmp_path, 600)
    (orphan,) = psutil.Process(first.pid).children()
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert is_held(tmp_path)
    threading.Timer(0.3, orphan.kill).start()
    taken = False
    with contextlib.suppress(LockHeld), hold(tmp_path):
        taken = json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    assert taken


def test_who_looks_disturbs_neither_others_who_look_nor_a_runner(tmp_path: Path) -> None:
    with hold(tmp_path):
        pass
    looks = "import fcntl, time; fcntl.flock(0, fcntl.LOCK_SH); print('looking', flush=True); time.sleep(60)"
    with (tmp_path / LOCK).open() as file:
        looking = subprocess.Popen([sys.executable, "-c", looks], stdin=file, stdout=subprocess.PIPE, text=True)
    assert looking.stdout is not None
    assert looking.stdout.readline() == "looking\n"
    try:
        assert not is_held(tmp_path)
    finally:
        looking.kill()
        looking.communicate()


def test_a_job_elsewhere_is_at_work_though_nobody_holds_the_lock(tmp_path: Path) -> None:
    (tmp_path / JOB).write_text(json.dumps({"launcher": "slurm", "id": 17}))
    with pytest.raises(LockHeld, match="is being made by slurm job 17"), hold(tmp_path):
        pass
    with hold(tmp_path, knows_jobs=True):
        assert is_held(tmp_path)
