"""What an address names: its scheme, or a path of this machine."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from common.errors import UserError
from common.secrets import Secret


def url_scheme(url: str) -> str:
    """Its scheme; "" for a plain path. Raises `UserError`."""
    try:
        return urlsplit(str(url)).scheme  # of a `Secret` as shown: a password may hold any character
    except ValueError:  # for example an incomplete IPv6 address
        raise UserError(f"{url} is not an address: its host is malformed; check it") from None


def local_path(url: str) -> Path:
    """The path that a file:// address or a plain path names. Raises `UserError`."""
    whole = url.reveal() if isinstance(url, Secret) else url
    if url_scheme(url) != "file":
        return Path(whole)
    parts = urlsplit(whole)
    if parts.netloc not in ("", "localhost"):
        host = parts.hostname or parts.netloc
        raise UserError(f"{url} names the host {host}; write file:///absolute/path (three slashes)")
    return Path(unquote(parts.path))
