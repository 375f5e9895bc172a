"""The interface of a console."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

#: Shows a line of a stage's command; True: the next line overwrites it, as in a progress bar.
Said = Callable[[str, bool], None]

#: "note: …", "pretrain-phase1: warning: …".
_URGENT = re.compile(r"(?:\S+: )?(?:note|warning|error): ")
#: Lines of libraries that tell a person nothing. The logs keep them.
_CHATTER = re.compile(r"\[Gloo\] |WARNING:root:Defaulting to PJRT_DEVICE=|\$ ")


class Console(Protocol):
    """Shows a run. Its lines no longer hold secrets."""

    def header(self, text: str) -> None:
        """What is about to run."""

    def line(self, text: str) -> None:
        """A line of this program."""

    def started(self, label: str, directory: Path) -> None:
        """A stage begins, or resumes."""

    def running(self, label: str, directory: Path) -> AbstractContextManager[Said]:
        """Entered while a stage's command runs in `directory`. Yields the function that shows its lines."""

    def lines(self) -> AbstractContextManager[Said]:
        """Yields the function that shows the lines of a command that is itself a run."""
        return nullcontext(lambda text, is_live: None if is_live else self.line(text))

    def complete(self, label: str, seconds: float, result: str) -> None:
        """A stage is complete. `result`: the last line of its command's output, without the stage's directory."""

    def failed(self, label: str, status: int | None, error: str) -> None:
        """A stage has failed for good; luigi's line tells a person. `status`: its command's exit status, if it ran."""
        return

    def interrupted(self, label: str) -> None:
        """The run was asked to stop while it made a stage; a line of this program tells a person."""
        return


def nothing() -> AbstractContextManager[Said]:
    """Shows no line of a command."""
    return nullcontext(lambda text, is_live: None)


def is_urgent(line: str) -> bool:
    """Whether a line is shown even where no others are."""
    return bool(_URGENT.match(line))


def is_chatter(line: str) -> bool:
    return bool(_CHATTER.match(line))
