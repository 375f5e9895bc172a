"""`python -m pipeline status --watch`: in a terminal, into a pipe, and how it ends."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stages.view.text import sparkline
from tests.helpers.chain import Chain, finished_chain
from tests.helpers.support import ROOT, command

WORDS = (sys.executable, "-m", "pipeline", "status", "--watch", "0.1")


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return finished_chain(tmp_path_factory)


def start(chain: Chain, stdout: int, **env: str) -> subprocess.Popen[bytes]:
    everything = {**os.environ, "LUIGI_CONFIG_PATH": str(chain.config), **env}
    return subprocess.Popen(WORDS, cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, env=everything)


def read_until(fd: int, pattern: str, timeout_s: float = 30) -> str:
    text, deadline = "", time.monotonic() + timeout_s
    while not re.search(pattern, text, re.DOTALL):
        assert time.monotonic() < deadline, text
        if select.select([fd], [], [], 0.2)[0]:
            text += os.read(fd, 1 << 16).decode()
    return text


def end(process: subprocess.Popen[bytes]) -> None:
    """Ctrl-C ends it with exit status 0 and no message."""
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=20)
    assert (process.returncode, said) == (0, b"")


def drawn_in_terminal(chain: Chain, pattern: str, **env: str) -> str:
    """What it writes to a terminal until `pattern` appears; then it is ended."""
    ours, theirs = pty.openpty()
    process = start(chain, theirs, **env)
    try:
        text = read_until(ours, pattern)
        end(process)
    finally:
        process.kill()
        os.close(ours)
        os.close(theirs)
    return text


def test_a_terminal_is_drawn_over_in_place(chain: Chain) -> None:
    text = drawn_in_terminal(chain, r"\x1b\[\d+F.*\x1b\[\d+F", COLUMNS="90", LINES="100")
    first, second, *_ = re.split(r"\x1b\[\d+F", text)
    (up,) = set(re.findall(r"\x1b\[(\d+)F", text))
    # The cursor goes up by as many lines as were drawn, and all of them fit.
    lines = second.replace("\x1b[J", "").split("\r\n")[:-1]
    assert len(lines) == int(up)
    assert max(map(len, lines)) <= 90
    for part in ("BERT pretraining: complete", "evaluate ", "loss ", "│", "masked-LM accuracy", "model: "):
        assert part in second, second
    assert "\x1b[J" in first


def test_a_low_terminal_gets_no_more_lines_than_it_has(chain: Chain) -> None:
    text = drawn_in_terminal(chain, r"\x1b\[\d+F", COLUMNS="60", LINES="12")
    assert text.split("\x1b[11F")[0].count("\n") == 11


def test_a_pipe_gets_plain_text_again_and_again(chain: Chain) -> None:
    process = start(chain, subprocess.PIPE, PYTHONUNBUFFERED="1")
    assert process.stdout is not None
    try:
        text = read_until(process.stdout.fileno(), "BERT pretraining.*BERT pretraining")
        end(process)
    finally:
        process.kill()
    assert "\x1b" not in text
    assert "\r" not in text


def test_it_ends_when_nobody_reads(chain: Chain) -> None:
    process = start(chain, subprocess.PIPE)
    assert process.stdout is not None
    try:
        read_until(process.stdout.fileno(), "BERT pretraining")
        process.stdout.close()
        assert process.wait(timeout=20) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""
        process.stderr.close()
    finally:
        process.kill()


@pytest.mark.parametrize("words", [("--watch", "0"), ("--watch", "soon"), ("--watch", "--json")], ids=str)
def test_what_it_cannot_do_is_an_unknown_option(words: tuple[str, ...]) -> None:
    done = command("-m", "pipeline", "status", *words)
    assert done.returncode == 2
    assert "allowed" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_sparkline_rises_with_the_values(tmp_path: Path) -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 0, 7) == "▁▂▃▄▅▆▇█"
    assert sparkline([3, 3], 3, 3) == "▁▁"
