"""Removals from a store are announced, so that whoever pushes meanwhile does not rely on a file that is about to go.

Who removes writes the announcement before it reads the records. Who pushes looks for announcements after it has written
its record: if there is none, a later removal will find the record, and an earlier one has ended.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator

from common.console import log
from common.errors import UserError
from common.threads import beside
from stages.directory.manifest import directory_name
from stages.store.backend import Backend, Conflict, Missing
from stages.store.records import REMOVALS, STAGES, Damaged, StageRecord, stage_of_key

#: Seconds between looks, and looks after which an unchanged announcement is that of a process that died.
_POLL_S, _PATIENCE = 1.0, 60
#: Seconds after which an announcement is renewed, far fewer than those after which others take it for a dead one's.
_RENEW_S = 10.0
#: Files that are removed without a look at whether others still wait.
_AT_ONCE = 1000


@contextlib.contextmanager
def announced(backend: Backend) -> Iterator[Callable[[], None]]:
    """Announce a removal for the block, however long a part of it takes. Yields what to call before each part; that
    raises `UserError` if others have taken this process for dead and rely on the files."""
    key = f"{REMOVALS}/{uuid.uuid4().hex}"
    contents = (f"{key} {number}".encode() for number in itertools.count())
    version, alone = backend.write(key, next(contents), replaces=None), threading.Lock()

    def go_on() -> None:
        nonlocal version
        with alone:
            try:
                version = backend.write(key, next(contents), replaces=version)
            except Conflict:
                raise UserError(
                    f"removing from {backend.url} took so long that others push again; run the same command again"
                ) from None

    def renew(over: threading.Event) -> None:
        while not over.wait(_RENEW_S):
            with contextlib.suppress(Exception):  # what lasts, the next part says
                go_on()

    try:
        with beside(renew):
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


def remove_files(backend: Backend, keys: Iterable[str], known: Collection[str], go_on: Callable[[], None]) -> None:
    """Remove files, then the records of stages that were pushed after the `known` ones were read and rely on them:
    whoever pushed one may have died since. `go_on` is called before each part."""
    in_order, removed = sorted(set(keys)), set[str]()
    try:
        for first in range(0, len(in_order), _AT_ONCE):
            go_on()
            batch = in_order[first : first + _AT_ONCE]
            removed.update(batch)
            backend.delete(batch)
        go_on()
    finally:  # above all if somebody has relied on the files
        _remove_records_of(backend, removed, known)


def _remove_records_of(backend: Backend, removed: Collection[str], known: Collection[str]) -> None:
    """Remove the records that are not `known` of stages that need a removed file."""
    for entry in list(backend.list(f"{STAGES}/")):
        stage = stage_of_key(entry.key)
        if entry.key in known or stage is None:
            continue
        with contextlib.suppress(Missing, Damaged):
            record = StageRecord.decode(backend.read(entry.key)[0], *stage)
            if any(file.key in removed for file in record.files):
                backend.delete([entry.key])
                name = directory_name(record.label, record.fingerprint)
                log(f"note: {name} was pushed meanwhile and lacks files; whoever pushes it sends them again")
