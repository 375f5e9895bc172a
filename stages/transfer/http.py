"""Objects at http:// and https://. Proxies, certificates and .netrc come from the environment (requests)."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, NoReturn

from common.errors import UserError, one_line
from common.secrets import Secret
from stages.transfer.remote import (
    CONNECT_TIMEOUT_S,
    READ_TIMEOUT_S,
    Changed,
    Transient,
    Version,
    check_part,
    chunks_of,
    refuse_status,
    version_of,
)

if TYPE_CHECKING:
    import requests


class HttpRemote:
    """One object on a web server. Each part follows the redirects again, so signed targets may expire in between."""

    def __init__(self, address: Secret, *, connections: int) -> None:
        from stages.transfer.session import DownloadSession

        #: The address in messages.
        self.url = str(address)
        self._address = address
        self._session = DownloadSession(connections=connections)

    def head(self) -> Version:
        """The current version, from a request for the first byte: servers of signed addresses refuse HEAD."""
        try:
            with self._get({"Range": "bytes=0-0"}) as answer:
                if answer.status_code == 416:
                    raise UserError(f"{self.url} is empty; check the address")
                self._refuse(answer)
                return version_of(self.url, answer.status_code, answer.headers)
        except _UnknownHost as error:
            raise UserError(f"{self.url}: {error}; check the address and this machine's network") from error
        except Changed as error:
            raise UserError(f"{self.url}: {error}; check the address") from error

    def read(self, version: Version, start: int, stop: int) -> Generator[bytes, None, None]:
        headers = {"Range": f"bytes={start}-{stop - 1}"} if version.ranges else {}
        if version.etag:
            headers["If-Match"] = version.etag
        elif version.modified:
            headers["If-Unmodified-Since"] = version.modified
        try:
            with self._get(headers) as answer:
                self._refuse(answer)
                check_part(answer.status_code, answer.headers, version, start, stop)
                with self._network_errors():
                    yield from chunks_of(lambda size: answer.raw.read(size, decode_content=False))
        except _UnknownHost as error:
            raise Transient(str(error)) from error

    @contextlib.contextmanager
    def _get(self, headers: dict[str, str]) -> Iterator[requests.Response]:
        # With a content encoding, lengths and ranges would count the compressed bytes.
        headers = {"Accept-Encoding": "identity", **headers}
        with self._network_errors():
            answer = self._session.get(
                self._address.reveal(), headers=headers, stream=True, timeout=(CONNECT_TIMEOUT_S, READ_TIMEOUT_S)
            )
        with answer:
            yield answer

    def _refuse(self, answer: requests.Response) -> None:
        status = answer.status_code
        if status in (200, 206):
            return
        refuse_status(status, answer.headers, answer.reason or "")
        what = {
            401: "it wants a login; check the address, or put the login into ~/.netrc",
            403: "access is denied; check the address, and whether it has expired or needs a login (~/.netrc)",
            404: "there is nothing there; check the address",
            410: "it is gone for good; find its new address",
        }
        raise UserError(f"{self.url}: HTTP {status}: {what.get(status, 'check the address')}")

    @contextlib.contextmanager
    def _network_errors(self) -> Iterator[None]:
        """Translate network errors to `Transient`, `_UnknownHost`, or `UserError` where a retry cannot help."""
        import requests
        import urllib3

        try:
            yield
        except requests.exceptions.SSLError as error:
            raise UserError(f"{self.url}: {_innermost(error)}; check the address and this machine's clock") from error
        except requests.exceptions.ConnectionError as error:
            _raise_connection_error(error)
        except (requests.exceptions.InvalidURL, requests.exceptions.TooManyRedirects) as error:
            raise UserError(f"{self.url}: {_innermost(error)}; check the address") from error
        except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
            raise Transient(_innermost(error)) from error


class _UnknownHost(Exception):
    """The host's name does not resolve."""


def _raise_connection_error(error: Exception) -> NoReturn:
    import urllib3

    reason = getattr(error.args[0] if error.args else None, "reason", None)
    if isinstance(reason, urllib3.exceptions.NameResolutionError):
        raise _UnknownHost("no such host is known here") from error
    raise Transient(_innermost(reason or error)) from error


def _innermost(error: Exception) -> str:
    """The message of the root cause, on one line."""
    while True:
        inner = error.__cause__ or error.__context__ or next((a for a in error.args if isinstance(a, Exception)), None)
        if not isinstance(inner, Exception):
            return one_line(error)
        error = inner
