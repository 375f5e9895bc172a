"""How luigi ends outside the command of a stage."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys

import pytest

from common.errors import UserError
from pipeline.luigi_adapters.exits import while_scheduling
from tests.helpers.support import ROOT, assert_one_line_error, command

SLOW = """
import sys, time, luigi
from luigi.retcodes import run_with_retcodes
from pipeline.luigi_adapters import workers

class Slow(luigi.Task):
    def complete(self):
        return False

    def run(self):
        print("running", flush=True)
        time.sleep(60)

workers.install()
run_with_retcodes(["Slow", "--local-scheduler", "--no-lock"])
"""


def test_ctrl_c_outside_a_command_has_the_status_of_a_stop() -> None:
    """As while luigi hashes a source, fetches a stage or waits for another machine."""
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 75, said
    assert "interrupted; the same command continues" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (UserError("lr = -1 is not allowed"), "error: lr = -1 is not allowed\n"),
        (
            PermissionError(errno.EACCES, os.strerror(errno.EACCES), "work/x/manifest.json"),
            "error: cannot read work/x/manifest.json: Permission denied; check its permissions\n",
        ),
    ],
)
def test_what_cannot_be_read_is_one_line(error: Exception, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Another user's stage in a shared work directory."""
    with pytest.raises(SystemExit) as ended, while_scheduling():
        raise error
    assert ended.value.code == 35
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("workers", ["0", "-2"])
def test_no_workers_are_refused(workers: str) -> None:
    """luigi would schedule everything, run nothing and say nothing."""
    done = command("-m", "luigi", "--module", "pipeline", "BertPhase2", "--workers", workers)
    assert_one_line_error(done, f"--workers is {workers}; allowed: 1 or more", status=35)
