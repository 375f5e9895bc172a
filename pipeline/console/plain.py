"""Lines on stderr: all of them for logs, or only notes, warnings and errors."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from common.console import clock, write
from pipeline.console.base import Console, Said, is_chatter, is_urgent

#: Seconds between two lines of a progress bar.
LIVE_INTERVAL_S = 10.0


class Plain(Console):
    """Every line, as in a log."""

    def header(self, text: str) -> None:
        self.line(text)

    def line(self, text: str) -> None:
        write(text + "\n")

    def started(self, label: str, directory: Path) -> None:
        self.line(f"{label}: started in {directory}")

    @contextlib.contextmanager
    def running(self, label: str, directory: Path) -> Iterator[Said]:
        shown = time.monotonic()

        def said(text: str, is_live: bool) -> None:
            nonlocal shown
            if is_live:
                if time.monotonic() - shown < LIVE_INTERVAL_S:
                    return
                shown = time.monotonic()
            if not is_chatter(text):
                self.line(text)

        yield said

    def complete(self, label: str, seconds: float, result: str) -> None:
        self.line(f"{label}: complete ({clock(seconds)})")


class Quiet(Plain):
    """What needs attention."""

    def header(self, text: str) -> None:
        pass

    def line(self, text: str) -> None:
        if is_urgent(text):
            super().line(text)

    def complete(self, label: str, seconds: float, result: str) -> None:
        pass
