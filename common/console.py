"""The console that a run writes to, which may go away while the run goes on."""

from __future__ import annotations

import contextlib
import errno
import os
import sys

from common.secrets import redact

#: What a write to a closed terminal, or to a pipe that nobody reads any more, fails with.
_GONE = (errno.EIO, errno.EPIPE, errno.ENXIO)


def clock(seconds: float) -> str:
    """`0:07`, `12:34`, `45:00:00`: minutes and seconds, with hours where there are any."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def log(line: str) -> None:
    """A line for the person at the console, without secrets."""
    write(redact(line) + "\n")


def write(text: str) -> None:
    """Show `text`. A console that cannot take it does not stop the run: the log has everything."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError as error:
        if error.errno in _GONE:
            _discard(sys.stderr.fileno())
        detach_if_closed()


def detach_if_closed() -> None:
    """If the terminal was closed, discard what is written to it from now on, by this process and by its libraries."""
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
