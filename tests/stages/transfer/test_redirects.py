"""Redirects between real servers: followed where nothing is lost; a login reaches only the host it was given for."""

from __future__ import annotations

import base64
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
import trustme

import stages.transfer.ranges
from pipeline.tasks.nights import notify
from tests.helpers.ready import bytes_of, download, pack, refused, write_random_shards
from tests.helpers.support import assert_one_line_error, forked
from tests.helpers.web import Fault, Handler, Web, serving

LOGIN = "Basic " + base64.b64encode(b"me:hunter2secret").decode()


@dataclass
class Site:
    """A server, and the logins that were sent to it."""

    web: Web
    logins: list[str | None]

    def by_name(self, host: str) -> str:
        """The same address, with another of this machine's names."""
        return self.web.url.replace("127.0.0.1", host)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_shards(tmp_path_factory.mktemp("shards") / "in", 1)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def tls(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1", "localhost").configure_cert(context)
    return context


@pytest.fixture
def sites(
    shards: Path, authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, Site]]:
    """Three servers of the archive: two with https, one with http. .netrc knows only 127.0.0.1."""
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password hunter2secret\n")
    (tmp_path / ".netrc").chmod(0o600)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "ca.pem"))
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    monkeypatch.setattr(stages.transfer.ranges, "BACKOFF_S", 0.01)
    data = pack(shards, "").read_bytes()
    with (
        serving(data, tls=tls(authority)) as secure,
        serving(data, tls=tls(authority)) as other,
        serving(data) as plain,
    ):
        found = {name: Site(web, []) for name, web in (("secure", secure), ("other", other), ("plain", plain))}
        for site in found.values():
            _listen(site)
        yield found


def _listen(site: Site) -> None:
    """Record the login of each request."""

    def note(handler: Handler) -> None:
        site.logins.append(handler.headers["Authorization"])

    site.web.probe_faults.extend([note] * 20)
    site.web.faults.extend([note] * 20)


def to(target: str, site: Site, code: int = 302) -> Fault:
    def redirect(handler: Handler) -> int:
        site.logins.append(handler.headers["Authorization"])
        return handler.answer(code, Location=target)

    return redirect


def send_on(site: Site, target: str) -> None:
    for faults in (site.web.probe_faults, site.web.faults):
        faults.clear()
        faults.extend([to(target, site)] * 20)


def test_from_https_to_http_is_refused_in_one_line(sites: dict[str, Site], tmp_path: Path) -> None:
    secure, plain = sites["secure"], sites["plain"]
    send_on(secure, f"{plain.web.url}?token=hunter3")
    message = refused(secure.web.url, tmp_path / "out")
    assert message == (
        f"{secure.web.url} redirects to {plain.web.url}, which is without encryption; it is not followed: check the "
        f"address, or give the one it leads to if you trust it"
    )
    assert secure.logins == [LOGIN], "the host .netrc names was sent the login, once: nothing is tried again"
    assert (plain.logins, plain.web.probes) == ([], 0)
    env = {"REQUESTS_CA_BUNDLE": str(tmp_path / "ca.pem"), "NETRC": str(tmp_path / ".netrc")}
    done = forked("stages.download", secure.web.url, "--out", tmp_path / "out2", **env)
    assert_one_line_error(done, "which is without encryption")
    assert plain.web.probes == 0


def test_a_redirect_while_it_is_fetched_is_refused_as_well(sites: dict[str, Site], tmp_path: Path) -> None:
    """The probe is answered; the request for a range is redirected."""
    secure, plain = sites["secure"], sites["plain"]
    secure.web.faults.clear()
    secure.web.faults.extend([to(plain.web.url, secure)] * 20)
    assert "which is without encryption" in refused(secure.web.url, tmp_path / "out")
    assert plain.web.parts == []


@pytest.mark.parametrize("target", ["file:///etc/hostname", "ftp://127.0.0.1/x", "gopher://me:hunter3@127.0.0.1/"])
def test_a_redirect_away_from_the_web_is_refused(sites: dict[str, Site], tmp_path: Path, target: str) -> None:
    send_on(sites["plain"], target)
    message = refused(sites["plain"].web.url, tmp_path / "out")
    assert "which is not on the web; it is not followed" in message
    assert "hunter3" not in message
    assert sites["plain"].web.probes == 1


@pytest.mark.parametrize(
    ("first", "second", "host", "login"),
    [
        ("plain", "secure", "127.0.0.1", LOGIN),  # .netrc names it
        ("secure", "other", "127.0.0.1", LOGIN),
        ("secure", "other", "localhost", None),  # .netrc names another host
        ("plain", "secure", "localhost", None),
    ],
)
@pytest.mark.parametrize("default", [False, True])
def test_a_login_reaches_the_host_it_is_for(
    sites: dict[str, Site], shards: Path, tmp_path: Path, first: str, second: str, host: str, login: str, default: bool
) -> None:
    """.netrc's `default` is sent to the address that was given, never to one that a server names."""
    if default:
        with (tmp_path / ".netrc").open("a") as file:
            file.write("default login anyone password hunter4\n")
    target = sites[second].by_name(host)
    send_on(sites[first], target)
    download(sites[first].web.url, tmp_path / "out", connections=1)
    assert bytes_of(tmp_path / "out") == bytes_of(shards)
    assert set(sites[second].logins) == {login}
    assert set(sites[first].logins) == {LOGIN}


def test_a_login_in_the_address_is_not_handed_on(sites: dict[str, Site], shards: Path, tmp_path: Path) -> None:
    secure, other = sites["secure"], sites["other"]
    send_on(secure, other.by_name("localhost"))
    address = secure.web.url.replace("127.0.0.1", "me:hunter2secret@localhost")
    download(address, tmp_path / "out", connections=1)
    assert bytes_of(tmp_path / "out") == bytes_of(shards)
    assert set(secure.logins) == {LOGIN}
    assert set(other.logins) == {None}


def test_to_another_place_without_encryption_goes_no_login(
    sites: dict[str, Site], shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".netrc").write_text("machine localhost login me password hunter2secret\n")
    plain = sites["plain"]
    with serving(b"", "/start.tar") as start:
        site = Site(start, [])
        send_on(site, plain.by_name("localhost"))
        download(start.url, tmp_path / "out", connections=1)
    assert bytes_of(tmp_path / "out") == bytes_of(shards)
    assert set(plain.logins) == {None}


def test_a_redirect_within_a_host_keeps_the_login(sites: dict[str, Site], shards: Path, tmp_path: Path) -> None:
    secure = sites["secure"]
    for faults in (secure.web.probe_faults, secure.web.faults):
        faults.appendleft(to("/elsewhere.tar", secure, 307))
    download(secure.web.url, tmp_path / "out", connections=1)
    assert bytes_of(tmp_path / "out") == bytes_of(shards)
    assert set(secure.logins) == {LOGIN}
    assert "/elsewhere.tar" in secure.web.paths


def test_a_webhook_that_redirects_was_not_told(sites: dict[str, Site]) -> None:
    """If followed, the POST would become a GET without the facts, which any page answers with 200."""

    class Hook(Handler):
        web = sites["plain"].web

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.answer(302, Location=sites["plain"].web.url)

    with ThreadingHTTPServer(("127.0.0.1", 0), Hook) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        problem = notify.by_webhook(f"http://127.0.0.1:{server.server_port}/hook", event="completion")
        server.shutdown()
    assert problem == "the webhook at 127.0.0.1 was not notified: it answered with status 302"
    assert sites["plain"].web.paths == []
