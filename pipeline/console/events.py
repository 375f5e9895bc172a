"""Events as JSON lines on stdout, for programs."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

from common.console import print_line
from common.files import utc_now
from pipeline.console.base import Console, Said, is_chatter
from stages.directory.records import read_progress

#: Least seconds between two "progress" events of a stage, which come with its output.
_PROGRESS_EVERY_S = 10.0


class Events(Console):
    """{"event", "time", …}: header, line, started, said, progress, complete, failed, interrupted."""

    def header(self, text: str) -> None:
        self._write("header", text=text)

    def line(self, text: str) -> None:
        self._write("line", text=text)

    def started(self, label: str, directory: Path) -> None:
        self._write("started", stage=label, directory=str(directory))

    @contextlib.contextmanager
    def running(self, label: str, directory: Path) -> Iterator[Said]:
        written = time.monotonic()

        def said(text: str, is_live: bool) -> None:
            nonlocal written
            if time.monotonic() - written >= _PROGRESS_EVERY_S and (progress := read_progress(directory)):
                written = time.monotonic()
                self._write("progress", stage=label, **progress)
            if not is_live and not is_chatter(text):
                self._write("said", stage=label, text=text)

        yield said

    def complete(self, label: str, seconds: float, result: str) -> None:
        self._write("complete", stage=label, seconds=round(seconds, 3), result=result)

    def failed(self, label: str, status: int | None, error: str) -> None:
        self._write("failed", stage=label, status=status, error=error)

    def interrupted(self, label: str) -> None:
        self._write("interrupted", stage=label)

    def _write(self, event: str, **values: object) -> None:
        print_line(json.dumps({"event": event, "time": utc_now(), **values}, ensure_ascii=False))
