"""Runs a scheduler's command-line tools."""

from __future__ import annotations

import shutil
import subprocess

from common.errors import UserError

#: Seconds for one command.
TIMEOUT_S = 60


def run_tool(*words: str, absent: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a tool with `given` as standard input; a timeout is a failure.

    Raises `UserError` with `absent` if it is not installed.
    """
    if shutil.which(words[0]) is None:
        raise UserError(f"{words[0]} was not found; {absent}")
    try:
        return subprocess.run(words, input=given, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(words, 1, "", f"{words[0]} took more than {TIMEOUT_S} s")


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """The last line of a tool's output."""
    lines = (done.stderr or done.stdout).strip().splitlines()
    return lines[-1] if lines else f"exit status {done.returncode}"
