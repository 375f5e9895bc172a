"""A `requests` session for downloads with strict rules on redirects and credentials."""

from __future__ import annotations

import netrc
import os
from pathlib import Path
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter
from requests.auth import HTTPBasicAuth

from common.errors import UserError
from common.secrets import public_address


class DownloadSession(requests.Session):
    """Follows redirects, but never from https to http and never to another scheme.

    Credentials go only to the host they were given for. After a redirect to another host, only a .netrc entry with
    that host's name is used, and only for https; the `default` entry is not, because the server chose the host.
    """

    def __init__(self, *, connections: int) -> None:
        super().__init__()
        adapter = HTTPAdapter(pool_connections=4, pool_maxsize=connections, max_retries=0)
        self.mount("http://", adapter)
        self.mount("https://", adapter)

    def get_redirect_target(self, resp: requests.Response) -> str | None:
        """The redirect target of a response; raises `UserError` for a forbidden one."""
        target = super().get_redirect_target(resp)
        if target is None:
            return None
        before = urlsplit(resp.url).scheme
        after = urlsplit(target).scheme.lower() or before
        if after not in ("http", "https") or (before, after) == ("https", "http"):
            what = "without encryption" if after == "http" else "not on the web"
            resp.close()
            raise UserError(
                f"{public_address(resp.url)} redirects to {public_address(target)}, which is {what}; it is not "
                f"followed: check the address, or give the one it leads to if you trust it"
            )
        return target

    def rebuild_auth(self, prepared_request: requests.PreparedRequest, response: requests.Response) -> None:
        """Called by requests for each redirect with the follow-up request."""
        assert response.request.url is not None
        assert prepared_request.url is not None
        if not self.should_strip_auth(  # type: ignore[no-untyped-call]
            response.request.url, prepared_request.url
        ):
            return
        prepared_request.headers.pop("Authorization", None)
        parts = urlsplit(prepared_request.url)
        login = _named_login(parts.hostname or "") if parts.scheme == "https" else None
        if login is not None:
            prepared_request.prepare_auth(HTTPBasicAuth(*login), prepared_request.url)


def _named_login(host: str) -> tuple[str, str] | None:
    """User and password of the .netrc entry for `host`; None without an entry or a readable .netrc."""
    path = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    try:
        user, _, password = netrc.netrc(path).hosts[host]
    except (OSError, KeyError, netrc.NetrcParseError):
        return None
    return user, password or ""
