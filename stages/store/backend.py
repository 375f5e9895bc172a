"""The storage behind a store: keys with bytes, and writes that fail if another writer was there first.

Implementations: `folder.py`, `s3.py`. `tests/contract/test_store_backends.py` tests what all of them promise.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

#: Called with the number of bytes that have been moved since the last call.
Report = Callable[[int], object]


def one_at_a_time(report: Report) -> Report:
    """Make `report` safe for a transfer with several threads."""
    lock = threading.Lock()

    def guarded(moved: int) -> None:
        with lock:
            report(moved)

    return guarded


class Missing(Exception):
    """There is nothing under this key."""


class Conflict(Exception):
    """The key does not hold what the writer has read."""


class Altered(Exception):
    """The bytes do not have the expected sha256."""


@dataclass(frozen=True)
class Entry:
    """A key, its size, and when it was written, in seconds since 1970 on the store's clock."""

    key: str
    bytes: int
    written: float


class Backend(Protocol):
    """Methods are thread-safe, and every one raises `UserError` if the store cannot be used."""

    #: The address, without secrets.
    url: str
    #: Parallel transfers.
    connections: int

    def read(self, key: str) -> tuple[bytes, str]:
        """The content of a small object and its version. Raises `Missing`."""
        ...

    def write(self, key: str, data: bytes, *, replaces: str | None) -> str:
        """Write a small object, durably and whole; returns its version.

        Raises `Conflict` unless the key holds version `replaces`; None: unless it holds nothing. No two writers may
        write the same bytes: finding them there counts as having written them, since a response may be lost.
        """
        ...

    def delete(self, keys: Collection[str]) -> None:
        """Delete objects; missing ones are not an error."""
        ...

    def list(self, prefix: str) -> Iterator[Entry]:
        """All objects whose keys begin with `prefix`, in any order; an omitted one may be removed as unused."""
        ...

    def present(self, keys: Collection[str]) -> dict[str, int]:
        """Those of `keys` that hold something, with their sizes in bytes."""
        ...

    def upload(self, key: str, path: Path, size: int, sha256: str, report: Report) -> None:
        """Store a file, durably and whole. Raises `Altered` if its size or sha256 differs, and OSError."""
        ...

    def download(self, key: str, path: Path, size: int, sha256: str, report: Report) -> None:
        """Write an object to the new file `path` and fsync it.

        Raises `Missing`; `Altered`, and leaves no file, if its size or sha256 differs.
        """
        ...

    def sweep(self, before: float) -> int:
        """Remove what uploads begun before this time (seconds since 1970) have left unfinished under our keys;
        returns how many."""
        ...
