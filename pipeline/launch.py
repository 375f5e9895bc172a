"""Starts a stage's command as a process of its own, shows and logs what it says, and hands signals on."""

from __future__ import annotations

import codecs
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from stages.manifest import HELD_FINGERPRINT_VARIABLE
from trainer.files import disk_errors
from trainer.process import PARENT_VARIABLE

#: Seconds between two live lines (progress bars) where the console is not a terminal.
LIVE_INTERVAL_S = 10.0
_FORWARDED = (signal.SIGINT, signal.SIGTERM)


def run(
    command: list[str], *, log: Path, fingerprint: str, keep_open: tuple[int, ...], say: Callable[[str], None]
) -> int:
    """Run `python command…` to its end; returns its exit status, negative for a signal.

    It has a process group of its own, dies if this process does, and keeps the descriptors `keep_open` (the stage's
    lock). Its output goes to the console and is appended to `log`. SIGINT and SIGTERM are handed on as SIGTERM, and
    this returns when the command has ended for them.
    """
    environment = {
        **os.environ,
        HELD_FINGERPRINT_VARIABLE: fingerprint,
        PARENT_VARIABLE: str(os.getpid()),
        "PYTHONUNBUFFERED": "1",
    }
    process = subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        pass_fds=keep_open,
        start_new_session=True,
    )

    def forward(signum: int, frame: FrameType | None) -> None:
        say(f"{signal.Signals(signum).name}: asking process {process.pid} to save and stop")
        os.killpg(process.pid, signal.SIGTERM)

    handlers = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {signum: signal.signal(signum, forward) for signum in _FORWARDED}
    try:
        with process, disk_errors(log):
            _show(process, log)
        return process.wait()
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


def last_error(log: Path) -> str:
    """What a failed command said last: its `error:` line, else its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines[-200:] if line.startswith("error: ")]
    return errors[0].removeprefix("error: ") if errors else (lines[-1] if lines else "it said nothing")


def _show(process: subprocess.Popen[bytes], log: Path) -> None:
    """Pass lines on to the log and the console; of what a progress bar rewrites in place, only now and then one."""
    terminal = sys.stderr.isatty()
    shown = time.monotonic()
    with log.open("a") as file:
        for line, is_live in _lines(process):
            if not is_live:
                file.write(line + "\n")
                file.flush()
                print(f"\r\x1b[K{line}" if terminal else line, file=sys.stderr, flush=True)
            elif terminal:
                print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
            elif time.monotonic() - shown >= LIVE_INTERVAL_S:
                shown = time.monotonic()
                print(line, file=sys.stderr, flush=True)


def _lines(process: subprocess.Popen[bytes]) -> Iterator[tuple[str, bool]]:
    """(text, whether it is to be overwritten by the next) for each piece that ends in a newline or carriage return."""
    assert process.stdout is not None
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    rest = ""
    while chunk := os.read(process.stdout.fileno(), 1 << 16):
        *pieces, rest = re.split(r"(\r\n|\r|\n)", rest + decode(chunk))
        for text, end in zip(pieces[::2], pieces[1::2], strict=True):
            if text.strip():
                yield text, end == "\r"
    if rest.strip():
        yield rest, False
