"""What a launcher runs, and its interface."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from common.errors import Interrupted
from pipeline.launchers.process import ProcessResult


@dataclass(frozen=True)
class StageCommand:
    """A stage's command and how to run it."""

    #: `<stage>[-phase<N>]`.
    label: str
    #: The stage directory; `lock` is the descriptor that holds its lock.
    directory: Path
    lock: int
    fingerprint: str
    #: Arguments after the Python interpreter, on each node.
    words: list[str]
    nodes: int
    #: Whether it resumes when it is started again.
    resumes: bool
    #: Seconds without a sign of life after which it is killed; None: never.
    hang_timeout_s: float | None
    #: Whether it is worth forking from a process that has imported torch.
    imports_torch: bool = False


class Launcher(Protocol):
    """Runs commands."""

    def run(self, work: StageCommand) -> ProcessResult:
        """Run it to its end. Raises `UserError`; `Detached` if it continues without this process."""
        ...


class Detached(Interrupted):
    """This process was asked to stop while it waited for a job, which continues."""
