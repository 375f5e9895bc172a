"""Writes to the console, which may be closed while the run goes on."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable
from typing import TextIO

from common.secrets import redact

#: Errors of a write to a closed terminal or to a pipe without a reader.
_GONE = (errno.EIO, errno.EPIPE, errno.ENXIO)


def clock(seconds: float) -> str:
    """`0:07`, `12:34`, `45:00:00`: minutes and seconds, with hours where there are any."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def log(line: str) -> None:
    """Show a line, without secrets."""
    _show(redact(line))


def show_lines_with(show: Callable[[str], None]) -> None:
    """From now on `log` calls `show`, instead of printing to stderr."""
    global _show
    _show = show


def write(text: str) -> None:
    """Print `text` to stderr."""
    write_to(sys.stderr, text)


def print_line(line: str) -> None:
    """Print a line to stdout, whose reader may have been killed."""
    write_to(sys.stdout, line + "\n")


def write_to(stream: TextIO, text: str) -> None:
    """Print `text`. A closed console does not stop the run: the log files have everything."""
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        if error.errno in _GONE:
            _discard(stream.fileno())
        detach_if_closed()


def _print(line: str) -> None:
    write(line + "\n")


_show: Callable[[str], None] = _print


def detach_if_closed() -> None:
    """If the terminal was closed, redirect stdout and stderr to /dev/null, for this process's libraries too."""
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError as error:
            if error.errno in _GONE:
                _discard(descriptor)


def _discard(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, descriptor)
        os.close(null)
