"""Interface of a downloadable object: its version and its byte ranges. Implementations: http.py, s3.py."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Protocol

from common.errors import UserError

#: Timeouts for connecting and for the next byte of a response, in seconds.
CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 30.0
#: Read size in bytes: the first of a response, and the maximum.
_FIRST_CHUNK_BYTES, CHUNK_BYTES = 256, 256 << 10

_WAIT_AND_TRY_AGAIN = frozenset({408, 425, 429})


@dataclass(frozen=True)
class Version:
    """Version of the object behind a URL."""

    #: Size of the whole object in bytes.
    length: int
    #: A strong ETag, with its quotes; None if the server sends none.
    etag: str | None
    #: Last-Modified, as sent by the server; None if it sends none.
    modified: str | None
    #: Whether the server supports range requests.
    ranges: bool

    @property
    def resumable(self) -> bool:
        """Whether ranges can be requested and verified to be of the same version."""
        return self.ranges and bool(self.etag or self.modified)

    def is_same_as(self, other: Version) -> bool:
        """Whether both are certain to be the same bytes."""
        if self.length != other.length:
            return False
        if self.etag or other.etag:
            return self.etag == other.etag
        return self.modified is not None and self.modified == other.modified

    def __str__(self) -> str:
        return f"{self.length:,} bytes, {self.etag or self.modified or 'neither ETag nor date'}"


@dataclass(frozen=True)
class LeastRate:
    """Minimum rate of a connection; a slower one is dropped and its range requested again, as with curl's
    --speed-limit and --speed-time."""

    #: 0: no minimum.
    bytes_per_s: float = 1000.0
    #: Measurement window in seconds.
    time_s: float = 60.0


class Transient(Exception):
    """A failure that a retry may fix."""

    def __init__(self, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class Changed(Exception):
    """The object is no longer the requested version."""


class Remote(Protocol):
    """An object behind a URL. Methods are thread-safe.

    Both raise `Transient`; `UserError`, naming what to check, where a retry cannot help.
    """

    #: The address, without secrets.
    url: str

    def head(self) -> Version:
        """The current version."""
        ...

    def read(self, version: Version, start: int, stop: int) -> Generator[bytes, None, None]:
        """Bytes [start, stop) of that version; the whole object if it does not support ranges.

        Also raises `Changed`.
        """
        ...


def chunks_of(read: Callable[[int], bytes]) -> Generator[bytes, None, None]:
    """Yield from `read(size)` until it returns nothing, with sizes that take a fraction of a second each.

    `read` blocks until `size` bytes have arrived, so large reads would hide the progress of a slow connection.
    """
    size = _FIRST_CHUNK_BYTES
    while True:
        began = time.monotonic()
        data = read(size)
        seconds = time.monotonic() - began
        if not data:
            return
        yield data
        if seconds < 0.1:
            size = min(2 * size, CHUNK_BYTES)
        elif seconds > 1:
            size = max(size // 2, _FIRST_CHUNK_BYTES)


def version_of(url: str, status: int, headers: Mapping[str, str]) -> Version:
    """The version described by the response to a request for the first byte.

    `headers` must be case-insensitive. Raises `UserError` if the length is missing or 0.
    """
    if status == 206:
        total = _content_range(headers)[2]
    else:
        length = _content_length(headers)
        if length is None:
            raise UserError(f"{url} does not say how long it is; fetch it by other means and give the file's path")
        total = length
    if not total:
        raise UserError(f"{url} is empty; check the address")
    return Version(total, _strong_etag(headers), headers.get("last-modified"), ranges=status == 206)


def check_part(status: int, headers: Mapping[str, str], version: Version, start: int, stop: int) -> None:
    """Raise `Changed` or `Transient` unless a response holds bytes [start, stop) of `version`."""
    if version.ranges and status == 200:
        raise Transient("the server sent the whole object instead of a part")
    expected = (start, stop - 1, version.length)
    got = _content_range(headers) if version.ranges else (start, stop - 1, _content_length(headers) or 0)
    now = Version(got[2], _strong_etag(headers), headers.get("last-modified"), version.ranges)
    if got[2] != version.length or (version.resumable and not version.is_same_as(now)):
        raise Changed(f"{version} → {now}")
    if got != expected:
        raise Transient(f"the server sent bytes {got[0]}-{got[1]} instead of {start}-{stop - 1}")


def refuse_status(status: int, headers: Mapping[str, str], reason: str = "") -> None:
    """Raise `Transient` or `Changed` for an error status that is not final."""
    if status in _WAIT_AND_TRY_AGAIN or status >= 500:
        raise Transient(f"HTTP {status}{reason and f' ({reason})'}", _retry_after_s(headers.get("retry-after")))
    if status in (412, 416):
        raise Changed(f"HTTP {status}")


def _strong_etag(headers: Mapping[str, str]) -> str | None:
    """The ETag; None for a weak one, which promises equivalence but not identical bytes."""
    etag = headers.get("etag")
    return etag if etag and not etag.startswith("W/") else None


def _content_length(headers: Mapping[str, str]) -> int | None:
    length = headers.get("content-length", "")
    return int(length) if length.isdigit() else None


def _content_range(headers: Mapping[str, str]) -> tuple[int, int, int]:
    found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", headers.get("content-range", ""))
    if found is None:
        raise Transient(f"the server sent a part with Content-Range {headers.get('content-range')!r}")
    return int(found[1]), int(found[2]), int(found[3])


def _retry_after_s(value: str | None) -> float | None:
    """Delay of a Retry-After header (seconds or a date), in seconds."""
    if not value:
        return None
    if value.strip().isdigit():
        return float(value)
    try:
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (TypeError, ValueError):  # malformed: ignored
        return None
