"""What a launcher is given, and what it does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pipeline.launchers.process import ProcessResult


@dataclass(frozen=True)
class StageCommand:
    """A stage's command."""

    #: `<stage>[-phase<N>]`.
    label: str
    #: The stage directory, whose lock, the descriptor `lock`, is held.
    directory: Path
    lock: int
    fingerprint: str
    #: What is run, on each node: arguments after the Python interpreter.
    words: list[str]
    nodes: int
    #: Whether it goes on from where it was when it is started again.
    resumes: bool
    #: Seconds of silence after which it is killed; None: never.
    hang_timeout_s: float | None


class Launcher(Protocol):
    """Runs commands."""

    def run(self, work: StageCommand) -> ProcessResult:
        """Run it to its end. Raises `UserError`; `Detached` if it goes on without this process."""
        ...


class Detached(Exception):
    """This process was asked to stop, and what it waited for goes on."""
