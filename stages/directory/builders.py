"""Several machines that fill one stage directory on a shared file system.

Each file depends only on its number, so each machine makes those whose number modulo the number of machines is its
rank. The first machine makes what exists only once, waits for the others' files and writes the manifest; the others
wait for it, so that all end together. A restarted machine makes the files that are missing.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.lock import HELD_FINGERPRINT_VARIABLE
from common.process import node_rank
from stages.directory.damaged import DAMAGED
from stages.directory.lock import JOB, is_held
from stages.directory.manifest import MANIFEST, AlreadyComplete, Identity, StageDirectory, why_incomplete
from stages.directory.progress import Progress, signs_of_life
from stages.directory.records import read_identity

#: Seconds between two checks for the other machines' files.
_LOOK_EVERY_S = 0.5


@dataclass(frozen=True)
class Builders:
    """This machine among those that fill a directory."""

    rank: int = 0
    count: int = 1

    @classmethod
    def here(cls, count: int) -> Builders:
        """This machine of `count`, with the rank that its launcher gave it. Raises `UserError`."""
        rank = node_rank() if count > 1 else 0
        if rank >= count:
            raise UserError(f"this machine's rank is {rank}; allowed with --builders {count}: 0 to {count - 1}")
        return cls(rank, count)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def makes(self, number: int) -> bool:
        """Whether the file with this number is made here."""
        return number % self.count == self.rank

    @contextlib.contextmanager
    def begin(self, out: Path, identity: Callable[[], Identity]) -> Iterator[StageDirectory]:
        """`StageDirectory.begin`: the first machine takes the lock, and the others wait until it has."""
        if self.is_first:
            with StageDirectory.begin(out, identity, alone=self.count == 1) as work:
                yield work
            return
        wanted = os.environ.get(HELD_FINGERPRINT_VARIABLE) or identity().fingerprint
        self.wait_for(lambda: _is_begun(out, wanted), f"machine 0 to start {out}")
        if why_incomplete(out, wanted) is None:
            raise AlreadyComplete
        record = read_identity(out)
        assert record is not None
        with signs_of_life(out):
            yield StageDirectory(out, Identity.of_record(record))
        print(f"machine {self.rank} of {self.count} has made its part of {out}")

    def progress(self, work: StageDirectory, label: str, total: int, unit: str) -> Progress | Unshown:
        """A progress bar: the first machine's shows what all have made, the others' are not shown."""
        return work.progress(label, total, unit) if self.is_first else Unshown()

    def wait_for_end(self, work: StageDirectory) -> None:
        """Wait until the first machine has completed the stage."""
        self.wait_for((work.path / MANIFEST).exists, "machine 0 to complete the stage")

    def wait_for(self, is_there: Callable[[], bool], what: str) -> None:
        """Wait, saying so only once: whoever started this process counts lines as signs of life; waiting is not one."""
        if is_there():
            return
        print(f"machine {self.rank} of {self.count} is waiting for {what}", file=sys.stderr)
        while not is_there():
            time.sleep(_LOOK_EVERY_S)


#: The only machine.
ALONE = Builders()


class Unshown:
    """A progress bar that is not shown."""

    def update(self, n: int = 1) -> None:
        """Do nothing."""

    def __enter__(self) -> Unshown:
        return self

    def __exit__(self, *_: Any) -> None:
        """Do nothing."""


def _is_begun(out: Path, fingerprint: str) -> bool:
    """Whether `out` is being filled for this fingerprint: by a process that holds its lock, or by a scheduler's job."""
    record = read_identity(out)
    if record is None or record["fingerprint"] != fingerprint:
        return False
    is_taken = is_held(out) or (out / JOB).exists()
    # Whoever has taken it first removes what is damaged.
    is_checked = not (out / MANIFEST).exists() and not (out / DAMAGED).exists()
    return (is_taken and is_checked) or why_incomplete(out, fingerprint) is None
