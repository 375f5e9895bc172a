"""What a store is kept in: keys with bytes, and writes that fail if another writer was there first.

Implementations: `folder.py`, `s3.py`. `tests/contract/test_store_backends.py` holds what all of them promise.
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
    """For a transfer with several threads."""
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
    """Bytes are not those of the expected sha256."""


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
        write the same bytes: finding them there counts as having written them, as an answer may be lost on its way.
        """
        ...

    def delete(self, keys: Collection[str]) -> None:
        """Delete objects; those that are not there are no error."""
        ...

    def list(self, prefix: str) -> Iterator[Entry]:
        """All objects whose keys begin with `prefix`, in any order: what is not listed may be removed as unused."""
        ...

    def present(self, keys: Collection[str]) -> dict[str, int]:
        """Those of `keys` that hold something, and how many bytes."""
        ...

    def upload(self, key: str, path: Path, size: int, sha256: str, report: Report) -> None:
        """Store a file, durably and whole. Raises `Altered` if it is not of this size and sha256, and OSError."""
        ...

    def download(self, key: str, path: Path, size: int, sha256: str, report: Report) -> None:
        """Write an object to the new file `path` and fsync it.

        Raises `Missing`; `Altered`, and leaves no file, if it is not of this size and sha256.
        """
        ...

    def sweep(self, before: float) -> int:
        """Remove what uploads begun before this time (seconds since 1970) have left unfinished; returns how many."""
        ...
