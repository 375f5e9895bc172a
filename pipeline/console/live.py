"""A terminal: one live line for the stage that runs, one line for each that is complete."""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from common.console import clock, write_to
from pipeline.console.base import Console, Said, is_urgent
from stages.directory.records import read_progress
from stages.view.text import number, size

if TYPE_CHECKING:
    from rich.table import Table

_BAR_WIDTH = 20
#: Width of stages' names in characters, so that lines are aligned.
_LABEL_WIDTH = 20


class Live(Console):
    """Drawn by rich, which leaves out colours if NO_COLOR is set."""

    def __init__(self) -> None:
        from rich import console

        self._console = console.Console(
            file=cast(IO[str], _Terminal(sys.stderr)), highlight=False, markup=False, emoji=False
        )

    def header(self, text: str) -> None:
        self._print(text, "bold")

    def line(self, text: str) -> None:
        self._print(text, "yellow" if is_urgent(text) else None)

    def started(self, label: str, directory: Path) -> None:
        pass

    @contextlib.contextmanager
    def running(self, label: str, directory: Path) -> Iterator[Said]:
        from rich.live import Live as Drawn
        from rich.spinner import Spinner

        spinner, began = Spinner("dots", style="cyan"), time.monotonic()

        def said(text: str, is_live: bool) -> None:
            if not is_live and is_urgent(text):
                self.line(f"{label}: {text}")

        def drawn() -> Table:
            return _row(spinner, label, time.monotonic() - began, read_progress(directory))

        with Drawn(get_renderable=drawn, console=self._console, refresh_per_second=4, transient=True):
            self._console.show_cursor(True)  # kill -9 would leave it hidden
            yield said

    def complete(self, label: str, seconds: float, result: str) -> None:
        from rich.text import Text

        name, time_taken = f"{label:{_LABEL_WIDTH}} ", f"{clock(seconds):>7}  "
        line = Text.assemble(("✓ ", "green"), (name, "bold"), (time_taken, "dim"), result)
        self._console.print(line, soft_wrap=True)

    def _print(self, text: str, style: str | None) -> None:
        self._console.print(text, style=style, soft_wrap=True)


def _row(spinner: Any, label: str, elapsed_s: float, progress: dict[str, Any]) -> Table:
    """spinner, label, elapsed time; bar, share, count, rate, time left, what is being done."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    row = Table.grid(padding=(0, 1))
    cells: list[Any] = [spinner, Text(f"{label:{_LABEL_WIDTH}}", "bold"), Text(f"{clock(elapsed_s):>7}", "dim")]
    done, total, per_s = (progress.get(name) for name in ("done", "total", "per_s"))
    if total and done is not None:
        left = f", {clock((total - done) / per_s)} left" if per_s else ""
        cells += [
            ProgressBar(total=total, completed=done, width=_BAR_WIDTH),
            Text(f"{done / total:4.0%}", "cyan"),
            Text(f"{_amounts(done, total, progress.get('unit', ''), per_s)}{left} "),
        ]
    for cell in cells:
        row.add_column(no_wrap=True, min_width=len(cell) if isinstance(cell, Text) else None)
    row.add_column(no_wrap=True, overflow="ellipsis")
    row.add_row(*cells, Text(str(progress.get("label", "")), "dim"))
    return row


def _amounts(done: int, total: int, unit: str, per_s: float | None) -> str:
    """`420/2,000 steps, 8.51/s`, `3.2 MB/9.5 MB, 1.1 MB/s`."""
    if unit == "B":
        return f"{size(done)}/{size(total)}" + (f", {size(per_s)}/s" if per_s else "")
    return f"{done:,}/{total:,} {unit}" + (f", {number(per_s)}/s" if per_s else "")


class _Terminal(io.TextIOBase):
    """The terminal, which may be closed while the run goes on."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return str(self._stream.encoding)

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return int(self._stream.fileno())

    def write(self, text: str) -> int:
        write_to(self._stream, text)
        return len(text)

    def flush(self) -> None:
        pass
