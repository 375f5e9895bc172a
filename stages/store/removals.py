"""Removals from a store are announced, so that whoever pushes meanwhile does not rely on a file that is about to go.

Who removes writes the announcement before it reads the records. Who pushes looks for announcements after it has written
its record: if there is none, a later removal will find the record, and an earlier one has ended.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator

from common.console import log
from common.errors import UserError
from stages.store.backend import Backend, Conflict, Missing
from stages.store.records import REMOVALS

#: Seconds between looks, and looks after which an unchanged announcement is that of a process that died.
_POLL_S, _PATIENCE = 1.0, 60


@contextlib.contextmanager
def announced(backend: Backend) -> Iterator[Callable[[], None]]:
    """Announce a removal for the block. Yields what to call before each part of it, far more often than every minute;
    that raises `UserError` if others have taken this process for dead and rely on the files."""
    key = f"{REMOVALS}/{uuid.uuid4().hex}"
    contents = (f"{key} {number}".encode() for number in itertools.count())
    version = backend.write(key, next(contents), replaces=None)

    def go_on() -> None:
        nonlocal version
        try:
            version = backend.write(key, next(contents), replaces=version)
        except Conflict:
            raise UserError(
                f"removing from {backend.url} took so long that others push again; run the same command again"
            ) from None

    try:
        yield go_on
    finally:
        backend.delete([key])


def await_removals(backend: Backend) -> bool:
    """Wait until nobody removes files; returns whether somebody did. Raises `UserError`."""
    was_any, unchanged = False, Counter[bytes]()
    while found := [entry.key for entry in backend.list(f"{REMOVALS}/")]:
        if not was_any:
            log(f"note: somebody removes files from {backend.url}; the push goes on after that")
        was_any = True
        for key in found:
            with contextlib.suppress(Missing):
                content = backend.read(key)[0]
                unchanged[content] += 1
                if unchanged[content] > _PATIENCE:
                    backend.delete([key])
        time.sleep(_POLL_S)
    return was_any
