"""Commands that are started through a fork server, and processes that have a server of their own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from common import forked
from common.forked import Forked, NewInterpreter, start_python
from common.process import PARENT_VARIABLE
from tests.helpers.support import ROOT, start_fork_server

#: Both kinds of commands, and what decides between them: a variable that is read at startup.
KINDS: tuple[tuple[type, dict[str, str]], ...] = ((Forked, {}), (NewInterpreter, {"MALLOC_ARENA_MAX": "3"}))


@pytest.fixture(autouse=True)
def server() -> None:
    """A fork server of the test process; skips the test where there can be none."""
    start_fork_server()
    if forked.way_to_server() == ({}, []):
        pytest.skip("this system has no pidfd_open: every command is a new interpreter")


def begin(tmp_path: Path, program: str, *words: str, **variables: str) -> Forked | NewInterpreter:
    """Start `python -m program words…` in `tmp_path`; its output goes to the file `output` there."""
    (tmp_path / "program.py").write_text(program)
    with (tmp_path / "output").open("wb") as file:
        return start_python(
            ["-m", "program", *words], environment={**os.environ, **variables}, output=file.fileno(), directory=tmp_path
        )


def said(tmp_path: Path) -> str:
    return (tmp_path / "output").read_text()


#: Starts a command with a server of its own, prints its id, and waits.
STARTER = """
import os, sys, time
from pathlib import Path
from common.forked import start, start_python
start(("json",))
for _ in range(int(sys.argv[2])):
    process = start_python(["-m", "program"], environment=os.environ, output=1, directory=Path(sys.argv[1]))
    os.write(1, f"{type(process).__name__} {process.pid}\\n".encode())  # at once: commands write there, too
    if sys.argv[2] != "1":
        os.write(1, f"ended {process.wait()}\\n".encode())
        time.sleep(0.5)  # the last of the server's descriptors is closed
time.sleep(100)
"""


@contextlib.contextmanager
def starter(tmp_path: Path, commands: int = 1, program: str = STARTER) -> Iterator[subprocess.Popen[str]]:
    (tmp_path / "program.py").write_text("import time; time.sleep(100)")
    variables = {name: value for name, value in os.environ.items() if name != PARENT_VARIABLE}
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path), str(commands)], cwd=ROOT, stdout=subprocess.PIPE, text=True,
        env=variables,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def answer(process: subprocess.Popen[str]) -> tuple[str, int]:
    assert process.stdout is not None
    word, number = process.stdout.readline().split()
    return word, int(number)


def is_gone(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True
