"""The interface of a console."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

#: Shows a line of a stage's command; True: the next one overwrites it, as those of a progress bar.
Said = Callable[[str, bool], None]

#: "note: …", "pretrain-phase1: warning: …".
_URGENT = re.compile(r"(?:\S+: )?(?:note|warning|error): ")
#: Lines of libraries that say nothing to a person. Logs have them.
_CHATTER = re.compile(r"\[Gloo\] |WARNING:root:Defaulting to PJRT_DEVICE=|\$ ")


class Console(Protocol):
    """Shows a run. Lines hold no secrets any more."""

    def header(self, text: str) -> None:
        """What is about to run."""

    def line(self, text: str) -> None:
        """A line of this program."""

    def started(self, label: str, directory: Path) -> None:
        """A stage begins, or goes on."""

    def running(self, label: str, directory: Path) -> AbstractContextManager[Said]:
        """While the command of a stage runs in `directory`. Yields what shows its lines."""

    def lines(self) -> AbstractContextManager[Said]:
        """Yields what shows the lines of a command that is a run of its own."""
        return nullcontext(lambda text, is_live: None if is_live else self.line(text))

    def complete(self, label: str, seconds: float, result: str) -> None:
        """A stage is complete. `result`: the last line that its command has said, without the stage's directory."""


def nothing() -> AbstractContextManager[Said]:
    """Shows no line of a command."""
    return nullcontext(lambda text, is_live: None)


def is_urgent(line: str) -> bool:
    """Whether a line is worth showing in place of all others."""
    return bool(_URGENT.match(line))


def is_chatter(line: str) -> bool:
    return bool(_CHATTER.match(line))
