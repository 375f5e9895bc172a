"""A terminal whose screen pyte emulates."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import termios
from collections.abc import Callable, Sequence
from pathlib import Path

import pyte


def in_terminal(
    words: Sequence[str], env: dict[str, str], look: Callable[[pyte.Screen, bytes], None], *, columns: int, rows: int,
    cwd: Path,
) -> int:  # fmt: skip
    """Run a command in a terminal; after each write, `look` at the screen and at what was written. Returns the exit
    status."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns), **env}
    process = subprocess.Popen(words, cwd=cwd, env=env, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    screen = pyte.Screen(columns, rows)
    stream = pyte.ByteStream(screen)
    while True:
        try:
            some = os.read(ours, 1 << 16)
        except OSError:  # the last process that had it open has ended
            break
        stream.feed(some)
        look(screen, some)
    os.close(ours)
    return process.wait()
