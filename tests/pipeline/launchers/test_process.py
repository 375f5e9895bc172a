"""How a stage's command is run: what becomes of its workers."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import psutil
import pytest

from pipeline.console.base import nothing
from pipeline.launchers import process
from pipeline.launchers.process import LaunchSpec
from tests.helpers.chain import wait_until

#: Starts a worker in a session of its own, which writes to the same pipe and takes no notice of SIGTERM; both hang.
HANGS = """
import subprocess, sys, time
worker = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
started = subprocess.Popen([sys.executable, "-c", worker], start_new_session=True)
print(started.pid, flush=True)
time.sleep(600)
"""


def test_the_workers_of_a_hung_command_are_killed_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else they could still write where the command, started again, writes."""
    monkeypatch.setattr(process, "SAVING_S", 0.0)
    result = process.run(
        ["-c", HANGS], directory=tmp_path, fingerprint="", keep_open=(), showing=nothing(), hang_timeout_s=3.0,
        start=LaunchSpec(is_shown=False),
    )  # fmt: skip
    assert (result.hung, result.how) == (True, "hung")
    (pid,) = [int(line) for line in (tmp_path / "stage.log").read_text().splitlines() if line.isdigit()]
    try:
        wait_until(lambda: not is_running(pid), timeout_s=30)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
