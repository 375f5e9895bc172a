"""Downloads over real HTTP: whole or not at all, whatever the server does, and never the same bytes twice."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

import stages.transfer.fetch
import stages.transfer.http
import stages.transfer.partial
import stages.transfer.ranges
import stages.transfer.remote
from common.files import read_json
from tests.helpers.chain import wait_until
from tests.helpers.ready import bytes_of, download, pack, refused, write_random, write_random_shards
from tests.helpers.support import ROOT, assert_one_line_error, forked
from tests.helpers.web import Fault, Handler, Web, cut, drip, serving, stall, status, then

MIB = 1 << 20


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_shards(tmp_path_factory.mktemp("shards") / "in", 3)


@pytest.fixture(scope="module")
def archive(shards: Path) -> bytes:
    """Six ranges of 1 MiB, the last of them shorter."""
    data = pack(shards, "").read_bytes()
    assert 5 * MIB < len(data) < 6 * MIB
    return data


@pytest.fixture
def web(archive: bytes) -> Iterator[Web]:
    with serving(archive) as web:
        yield web


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits and ranges as small as the object: they determine when, not what."""
    monkeypatch.setattr(stages.transfer.ranges, "_RANGE_MAX_BYTES", MIB)
    monkeypatch.setattr(stages.transfer.ranges, "BACKOFF_S", 0.01)


def ranges_of(web: Web) -> list[tuple[int, int]]:
    found = []
    for asked in web.parts:
        assert asked is not None
        start, last = asked.removeprefix("bytes=").split("-")
        found.append((int(start), int(last) + 1))
    return sorted(found)


def test_the_same_bytes_arrive_each_once(web: Web, shards: Path, tmp_path: Path) -> None:
    counts = download(web.url, tmp_path / "out")
    assert bytes_of(tmp_path / "out") == bytes_of(shards)
    asked = ranges_of(web)
    assert len(asked) == 6
    assert [start for start, _ in asked] == [0, *(stop for _, stop in asked[:-1])]
    assert set(web.demands) == {web.etag}
    assert web.sent == len(web.data) + 1  # the first byte once more, to see what is there
    assert counts["source"] == {
        "url": web.url, "length": len(web.data), "etag": web.etag, "modified": web.modified, "ranges": True,
    }  # fmt: skip
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *bytes_of(shards), "lock", "stage.json", "manifest.json", "download.json"
    }  # fmt: skip


def test_ranges_are_fetched_at_the_same_time(web: Web, shards: Path, tmp_path: Path) -> None:
    """The server answers nothing until four requests have come."""
    meeting = threading.Barrier(4, timeout=30)
    web.faults.extend([then(meeting.wait)] * 4)
    download(web.url, tmp_path / "out", connections=4)
    assert not meeting.broken
    assert bytes_of(tmp_path / "out") == bytes_of(shards)


def test_one_connection_asks_for_one_range_after_the_other(web: Web, shards: Path, tmp_path: Path) -> None:
    download(web.url, tmp_path / "out", connections=1)
    assert [int(asked.removeprefix("bytes=").split("-")[0]) for asked in web.parts if asked] == [
        start for start, _ in ranges_of(web)
    ]
    assert bytes_of(tmp_path / "out") == bytes_of(shards)


@pytest.mark.parametrize(
    "fault",
    [status(429), status(500), status(503), status(408), cut(0), cut(1000), cut(300_000)],
    ids=["429", "500", "503", "408", "cut at once", "cut early", "cut late"],
)
def test_what_passes_is_tried_again(web: Web, shards: Path, tmp_path: Path, fault: Fault) -> None:
    web.faults.extend([fault] * 5)
    web.probe_faults.extend([status(503)] * 2)
    download(web.url, tmp_path / "out", connections=2)
    assert bytes_of(tmp_path / "out") == bytes_of(shards)
    # What had arrived before a connection was cut is not fetched again.
    assert web.sent == len(web.data) + 1
    assert len(web.parts) == 6 + 5


def test_a_stalled_connection_is_given_up_and_its_range_asked_for_again(
    web: Web, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages.transfer.http, "READ_TIMEOUT_S", 2.0)
    never = threading.Event()
    web.faults.append(stall(never))
    try:
        download(web.url, tmp_path / "out", connections=1)
    finally:
        never.set()
    assert bytes_of(tmp_path / "out") == bytes_of(shards)
    assert "trying again in" in capsys.readouterr().err
    assert len(web.parts) == 6 + 1


def test_tries_are_bounded_and_what_came_stays(web: Web, shards: Path, tmp_path: Path) -> None:
    web.budget = None
    tries = stages.transfer.ranges.TRIES
    web.faults.extend([*[then(lambda: None)] * 2, *[status(503)] * tries])
    message = refused(web.url, tmp_path / "out", connections=1)
    assert f"HTTP 503 (Service Unavailable), {tries} times in a row" in message
    assert "run the same again: it resumes from the bytes that are there" in message
    assert len(web.parts) == 2 + tries
    download(web.url, tmp_path / "out")
    assert web.sent == len(web.data) + 2
    assert bytes_of(tmp_path / "out") == bytes_of(shards)


def test_waits_grow_and_a_server_may_ask_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages.transfer.ranges, "BACKOFF_S", 1.0)
    waits: list[float] = []

    class Noted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            waits.append(timeout)
            return False

    tries = stages.transfer.ranges.Tries("URL", Noted(), lambda line: None)
    for _ in range(5):
        tries.failed(stages.transfer.remote.Transient("no"))
    for wait, wanted in zip(waits, [1, 2, 4, 8, 16], strict=True):
        assert 0.75 * wanted <= wait <= 1.25 * wanted
    tries.failed(stages.transfer.remote.Transient("no"), worth=True)  # the count begins anew
    for retry_after, least, most in ((90.0, 90, 90), (10_000.0, 120, 120), (0.0, 6, 10)):
        tries.failed(stages.transfer.remote.Transient("no", retry_after))
        assert least <= waits[-1] <= most


def test_retry_after_is_read_as_seconds_or_a_date() -> None:
    seconds = []
    for value in ("7", "Fri, 21 Nov 2125 10:00:00 GMT", "Fri, 21 Nov 2025 10:00:00 GMT", "soon"):
        with pytest.raises(stages.transfer.remote.Transient) as error:
            stages.transfer.remote.refuse_status(429, {"retry-after": value})
        seconds.append(error.value.retry_after_s)
    assert seconds[0] == 7
    assert seconds[1] is not None
    assert seconds[1] > 1e9
    assert seconds[2:] == [0, None]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (401, "it wants a login; check the address, or put the login into ~/.netrc"),
        (403, "access is denied; check the address, and whether it has expired or needs a login"),
        (404, "there is nothing there; check the address"),
        (410, "it is gone for good"),
        (451, "check the address"),
    ],
)
def test_what_another_try_cannot_better_is_refused_at_once(web: Web, tmp_path: Path, code: int, words: str) -> None:
    web.probe_faults.append(status(code))
    message = refused(web.url, tmp_path / "out")
    assert message.startswith(f"{web.url}: HTTP {code}: ")
    assert words in message
    assert (web.probes, web.parts) == (1, [])
    web.faults.append(status(code))
    assert words in refused(web.url, tmp_path / "out", connections=1)
    assert len(web.parts) == 1


def test_a_host_or_port_that_is_not_there_is_one_line(web: Web, tmp_path: Path) -> None:
    message = refused("http://no-such-host.invalid/shards.tar", tmp_path / "out")
    assert message.startswith("http://no-such-host.invalid/shards.tar: no such host is known here; check the address")
    closed = "http://127.0.0.1:1/shards.tar"  # nobody listens on port 1
    assert f"{closed}: [Errno 111] Connection refused, 7 times in a row" in refused(closed, tmp_path / "out2")
    secure = web.url.replace("http://", "https://")
    message = refused(secure, tmp_path / "out3")
    assert message.startswith(secure)


def test_https_wants_a_certificate_it_can_trust(
    archive: bytes, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, context = trustme.CA(), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    monkeypatch.delenv("REQUESTS_CA_BUNDLE", raising=False)
    with serving(archive, tls=context) as web:
        message = refused(web.url, tmp_path / "out")
        assert message.startswith(f"{web.url}: ")
        assert "certificate verify failed" in message
        authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "ca.pem"))
        download(web.url, tmp_path / "out")
        assert bytes_of(tmp_path / "out") == bytes_of(shards)


def test_an_object_changed_between_two_reads_starts_over(
    web: Web, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of the old object has arrived when it changes."""
    new = web.data
    web.replace(bytes(reversed(new)))
    web.faults.extend([then(lambda: None)] * 3 + [then(lambda: web.replace(new))])
    download(web.url, tmp_path / "out", connections=1)
    assert bytes_of(tmp_path / "out") == bytes_of(shards)
    assert f"note: {web.url} was changed while it was fetched" in capsys.readouterr().err


@pytest.mark.parametrize("seen", ["etag", "date", "length"])
def test_a_change_is_seen_where_the_server_knows_no_conditions(
    web: Web, shards: Path, tmp_path: Path, seen: str
) -> None:
    new, web.conditions = web.data, False
    web.replace(new[:-512] if seen == "length" else bytes(reversed(new)))
    before = web.etag
    web.faults.extend([then(lambda: None)] * 3 + [then(lambda: _replace(web, new, seen, before))])
    if seen == "date":
        web.etag, before = None, web.modified
    download(web.url, tmp_path / "out", connections=1)
    assert web.demands[0] == before
    assert bytes_of(tmp_path / "out") == bytes_of(shards)


def _replace(web: Web, new: bytes, seen: str, etag: str | None) -> None:
    web.replace(new)
    if seen == "date":
        web.etag, web.modified = None, "Fri, 21 Nov 2025 12:00:00 GMT"
    elif seen == "etag":
        web.modified = "Fri, 21 Nov 2025 11:00:00 GMT"
    else:
        web.etag, web.modified = etag, "Fri, 21 Nov 2025 11:00:00 GMT"


def test_an_object_that_never_stays_is_given_up(web: Web, tmp_path: Path) -> None:
    web.faults.extend([then(lambda: web.replace(web.data[1:] + web.data[:1]))] * 9)
    message = refused(web.url, tmp_path / "out", connections=1)
    assert "was changed 3 times while it was fetched" in message


@pytest.mark.parametrize("kind", ["no ranges", "no version", "weak version"])
def test_a_server_that_cannot_resume_is_read_in_one_go(
    web: Web, shards: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if kind == "no ranges":
        web.ranges = False
    else:
        web.etag, web.modified = ('W/"1"' if kind == "weak version" else None), None
    web.faults.extend([cut(100_000), cut(3_000_000)])
    download(web.url, tmp_path / "out")
    assert bytes_of(tmp_path / "out") == bytes_of(shards)
    assert len(web.parts) == 3
    said = capsys.readouterr().err
    assert "so one connection fetches it, and starts over if cut off" in said
    assert ("sends no parts" in said) == (kind == "no ranges")


def test_a_wrong_sha256_is_refused_and_fetched_anew(web: Web, shards: Path, tmp_path: Path) -> None:
    right, wrong = hashlib.sha256(web.data).hexdigest(), web.data
    web.data = bytes([wrong[0] ^ 1]) + wrong[1:]
    seen = hashlib.sha256(web.data).hexdigest()
    message = refused(web.url, tmp_path / "out", sha256=right)
    assert message.startswith(f"{web.url} has the sha256 {seen}, not the expected {right}")
    web.data = wrong
    download(web.url, tmp_path / "out", sha256=right)
    assert bytes_of(tmp_path / "out") == bytes_of(shards)


def test_space_is_checked_before_anything_is_fetched(web: Web, tmp_path: Path) -> None:
    web.length = 10**18
    message = refused(web.url, tmp_path / "out")
    parts = f"({10**18:,} bytes still to fetch, {10**18:,} of contents)"
    assert f"{web.url} {parts} needs {2 * 10**18:,} bytes" in message
    assert web.parts == []


def test_what_is_no_archive_or_no_data_set_is_looked_at_again(web: Web, shards: Path, tmp_path: Path) -> None:
    """A login page, say, with status 200; then the real thing, and then the network is not used any more."""
    whole = web.data
    web.replace(b"<html>please log in</html>" * 100)
    assert f"{web.url} is not a tar archive" in refused(web.url, tmp_path / "out")
    assert "is not a tar archive" in refused(web.url, tmp_path / "out")
    assert len(web.parts) == 1  # it is still the same
    web.replace(whole)
    download(web.url, tmp_path / "out")
    assert bytes_of(tmp_path / "out") == bytes_of(shards)


def test_a_damaged_archive_is_fetched_anew(web: Web, shards: Path, tmp_path: Path) -> None:
    whole = web.data
    web.replace(whole[: len(whole) // 2])
    assert "is damaged or cut off" in refused(web.url, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "lock",
        "stage.json",
        "download.json",
        "progress.json",
    }
    web.replace(whole)
    download(web.url, tmp_path / "out")
    assert bytes_of(tmp_path / "out") == bytes_of(shards)


def test_the_archive_stays_if_it_is_to(web: Web, tmp_path: Path) -> None:
    download(web.url, tmp_path / "out", keep_archive=True)
    assert (tmp_path / "out/archive").read_bytes() == web.data


def test_a_lost_shard_is_made_anew_and_never_of_another_version(web: Web, shards: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    download(web.url, out)
    there = (out / "x_training_0.hdf5").stat().st_mtime_ns
    (out / "x_training_1.hdf5").unlink()
    download(web.url, out)
    assert (out / "x_training_0.hdf5").stat().st_mtime_ns == there
    assert bytes_of(out) == bytes_of(shards)
    (out / "x_training_1.hdf5").unlink()
    other = write_random(tmp_path / "other/x_training_0.hdf5", seed=9)
    web.replace(pack(other.parent, "").read_bytes())
    download(web.url, out)
    assert bytes_of(out) == bytes_of(other.parent)


def test_a_secret_in_an_address_is_told_nobody(web: Web, tmp_path: Path) -> None:
    address = web.url.replace("//", "//me:hunter2@") + "?part=1&X-Amz-Signature=hunter3"
    download(address, tmp_path / "out")
    assert all(path == "/shards.tar?part=1&X-Amz-Signature=hunter3" for path in web.paths)
    for path in (tmp_path / "out").glob("*.json"):
        assert "hunter" not in path.read_text()
    assert json.loads((tmp_path / "out/manifest.json").read_text())["inputs"]["source"] == f"{web.url}?part=1"


COMMAND = (sys.executable, "-m", "stages.download")


def start(web: Web, out: Path) -> subprocess.Popen[str]:
    words = (web.url, "--out", str(out), "--processes", "1", "--connections", "3")
    return subprocess.Popen([*COMMAND, *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def recorded(out: Path) -> int:
    state = read_json(out / "download.json") or {"have": []}
    return sum(stop - start for start, stop in state["have"])


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_download_fetches_only_what_is_missing(
    web: Web, shards: Path, tmp_path: Path, signum: signal.Signals
) -> None:
    out, web.budget = tmp_path / "out", 7 * MIB // 2
    process = start(web, out)
    wait_until(lambda: recorded(out) > 2 * MIB, timeout_s=60, every_s=0.05)
    process.send_signal(signum)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == (75 if signum == signal.SIGINT else -signum)
    assert "Traceback" not in said
    had, progress = recorded(out), read_json(out / "progress.json")
    assert progress is not None
    assert (progress["label"], progress["total"], progress["unit"]) == ("download", len(web.data), "B")
    assert 0 < progress["done"] <= had
    web.open_again.set()
    web.budget, web.sent = None, 0
    done = forked("stages.download", web.url, "--out", out, "--processes", 1)
    assert done.returncode == 0, done.stdout
    assert web.sent == len(web.data) - had + 1
    assert bytes_of(out) == bytes_of(shards)


def test_an_object_changed_after_a_kill_starts_over(web: Web, shards: Path, tmp_path: Path) -> None:
    out, web.budget, right = tmp_path / "out", 4 * MIB, web.data
    web.replace(bytes(reversed(right)))
    process = start(web, out)
    wait_until(lambda: recorded(out) > 2 * MIB, timeout_s=60, every_s=0.05)
    process.kill()
    process.communicate(timeout=60)
    web.open_again.set()
    web.budget, web.sent = None, 0
    web.replace(right)
    done = forked("stages.download", web.url, "--out", out, "--processes", 1)
    assert done.returncode == 0, done.stdout
    assert f"note: {web.url}: it has changed (" in done.stdout
    assert web.sent == len(web.data) + 1
    assert bytes_of(out) == bytes_of(shards)


#: Where a run is killed, and how many bytes the next one may request; None: all.
POINTS = {
    "write-before:download.json": None,
    "download-range:0": None,
    "rename-after:download.json": None,
    "rename-before:archive": 0,
    "rename-after:archive": 0,
    "write-after:x_training_1.hdf5": 0,
    "rename-after:x_training_2.hdf5": 0,
    "write-before:unpacked.json": 0,
    "rename-after:unpacked.json": 0,
    "write-before:manifest.json": 0,
    "rename-before:manifest.json": 0,
}


@pytest.mark.slow
def test_wherever_it_is_killed_nothing_is_fetched_twice(web: Web, shards: Path, tmp_path: Path) -> None:
    wanted = bytes_of(shards)
    for point, missing in POINTS.items():
        out = tmp_path / point.replace(":", "-")
        words = (web.url, "--out", out, "--processes", 1)
        assert forked("stages.download", *words, FAILPOINT=point).returncode == -signal.SIGKILL, point
        web.sent = web.probes = 0
        done = forked("stages.download", *words)
        assert done.returncode == 0, (point, done.stdout)
        assert (web.sent, web.probes) == ((0, 0) if missing == 0 else (len(web.data) + 1, 1)), point
        assert bytes_of(out) == wanted, point
        assert not [path.name for path in out.iterdir() if path.name in ("archive", "unpacked.json", "download.part")]


def test_the_command_says_one_line(web: Web, tmp_path: Path) -> None:
    web.probe_faults.append(status(404))
    done = forked("stages.download", web.url, "--out", tmp_path / "out")
    assert_one_line_error(done, web.url, "HTTP 404: there is nothing there; check the address")
    assert os.listdir(tmp_path / "out")  # the stage's own bookkeeping


SLOW = {"low_speed_limit_bytes_per_s": 1000, "low_speed_time_s": 3}


@pytest.mark.parametrize("headers", [False, True], ids=["body", "headers"])
def test_a_connection_below_the_least_rate_is_dropped_and_its_range_asked_for_again(
    web: Web, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], headers: bool
) -> None:
    over = threading.Event()
    web.faults.extend([then(lambda: None), drip(0.1 if headers else 0.005, over, headers=headers)])
    try:
        download(web.url, tmp_path / "out", connections=2, **SLOW)
    finally:
        over.set()
    assert bytes_of(tmp_path / "out") == bytes_of(shards)
    assert len(web.parts) == 6 + 1
    starts = [start for start, _ in ranges_of(web)]
    again = starts[-1] if headers else max(set(starts) - {at * MIB for at in range(6)})
    if not headers:
        assert 0 < again % MIB < 3000, "it goes on from the byte where it was"
    said = capsys.readouterr().err
    # 3 s, and on a busy machine longer.
    assert re.search(r"bytes in ([3-9]|\d\d) s, less than 1000 bytes/s; trying again in", said), said


@pytest.mark.slow
def test_a_server_that_stays_too_slow_is_given_up_in_one_line(web: Web, shards: Path, tmp_path: Path) -> None:
    over, tries = threading.Event(), stages.transfer.ranges.TRIES
    web.faults.extend([drip(0.005, over)] * tries)
    try:
        message = refused(web.url, tmp_path / "out", connections=1, **SLOW)
    finally:
        over.set()
    assert "less than 1000 bytes/s, 7 times in a row; check network and server, then run the same" in message
    assert len(web.parts) == tries
    had = recorded(tmp_path / "out")
    assert 0 < had < tries * 3000
    web.sent = 0
    download(web.url, tmp_path / "out")
    assert web.sent == len(web.data) - had + 1, "what came slowly is not fetched again"
    assert bytes_of(tmp_path / "out") == bytes_of(shards)


def test_an_answer_whose_headers_never_end_is_given_up(
    web: Web, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Including the first request, which asks what is there."""
    for name in ("CONNECT_TIMEOUT_S", "READ_TIMEOUT_S"):
        monkeypatch.setattr(stages.transfer.fetch, name, 0.0)
    over = threading.Event()
    web.probe_faults.append(drip(0.1, over, headers=True))
    try:
        download(web.url, tmp_path / "out", low_speed_limit_bytes_per_s=1000, low_speed_time_s=3)
    finally:
        over.set()
    assert bytes_of(tmp_path / "out") == bytes_of(shards)
    assert "no whole answer in 3 s; trying again" in capsys.readouterr().err
    assert web.probes == 2


def test_a_slow_connection_above_the_least_rate_is_left_alone(web: Web, shards: Path, tmp_path: Path) -> None:
    """A few kilobytes a second: a read must not wait for more than arrives in the time that is measured."""
    web.data = web.data[: 12 << 10]
    web.faults.append(_in_pieces(1 << 10, 0.25))
    assert "is damaged or cut off" in refused(
        web.url, tmp_path / "out", connections=1, low_speed_limit_bytes_per_s=500, low_speed_time_s=1.5
    )
    assert len(web.parts) == 1


def _in_pieces(size: int, every_s: float) -> Fault:
    """Send the whole object, `size` bytes at a time."""

    def send(handler: Handler) -> int:
        data = handler.web.data
        handler.send_response(206)
        handler.send_header("Content-Range", f"bytes 0-{len(data) - 1}/{len(data)}")
        handler.send_header("Content-Length", str(len(data)))
        handler.send_header("ETag", str(handler.web.etag))
        handler.end_headers()
        for at in range(0, len(data), size):
            handler.wfile.write(data[at : at + size])
            time.sleep(every_s)
        return -1

    return send


@pytest.mark.slow
def test_without_a_least_rate_a_connection_may_take_its_time(web: Web, shards: Path, tmp_path: Path) -> None:
    over = threading.Event()
    web.data = web.data[:1024]
    web.faults.append(drip(0.005, over))
    message = refused(web.url, tmp_path / "out", low_speed_limit_bytes_per_s=0, low_speed_time_s=1)
    assert "is not a tar archive" in message or "is damaged" in message
    assert len(web.parts) == 1


def test_the_state_lists_only_what_is_on_the_disk(
    web: Web, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill, which keeps the page cache, cannot tell."""
    on_disk, listed = b"", []
    fsync, write = os.fsync, stages.transfer.partial.State.write

    def synced(fd: int) -> None:
        nonlocal on_disk
        name = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if name.name == stages.transfer.partial.PART:
            on_disk = name.read_bytes()
            time.sleep(0.05)  # more arrives meanwhile
        fsync(fd)

    def written(state: stages.transfer.partial.State, directory: Path) -> None:
        listed.extend(state.have)
        assert all(on_disk[start:stop] == web.data[start:stop] for start, stop in state.have)
        write(state, directory)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(stages.transfer.partial.State, "write", written)
    monkeypatch.setattr(stages.transfer.ranges, "_SAVE_INTERVAL_S", 0.0)
    web.faults.extend([cut(300_000)] * 2)
    download(web.url, tmp_path / "out")
    assert bytes_of(tmp_path / "out") == bytes_of(shards)
    assert listed
