"""Downloads from S3: moto's server, through boto3, and a server that fails in ways moto's does not."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.awsrequest import AWSResponse
from urllib3 import HTTPResponse

import stages.transfer.ranges
import stages.transfer.s3
from common.secrets import Secret
from stages.transfer.remote import Version
from tests.helpers.chain import Chain
from tests.helpers.ready import bytes_of, download, pack, refused, write_random_shards
from tests.helpers.stores.s3 import KEYS, moto
from tests.helpers.support import assert_one_line_error, forked, write_dataset
from tests.helpers.web import Fault, cut, drip, serving, stall, status, then

MIB = 1 << 20
KEY = "training_datasets/shards.tar"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with moto() as server:
        yield f"http://{server}"


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_shards(tmp_path_factory.mktemp("shards") / "in", 2)


@pytest.fixture(scope="module")
def bucket(endpoint: str, shards: Path) -> Any:
    """A public bucket `data` with the archive, and a bucket `private` with the same archive."""
    client = boto3.client("s3", endpoint_url=endpoint, **KEYS)  # type: ignore[arg-type]
    for name in ("data", "private"):
        client.create_bucket(Bucket=name)
        client.upload_file(str(pack(shards, "")), name, KEY)
    client.put_object_acl(Bucket="data", Key=KEY, ACL="public-read")
    return client


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Short waits for tests, ranges as small as the object, and no AWS configuration of the user's."""
    monkeypatch.setattr(stages.transfer.ranges, "_RANGE_MAX_BYTES", MIB)
    monkeypatch.setattr(stages.transfer.ranges, "BACKOFF_S", 0.01)
    for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def test_the_same_bytes_arrive_unsigned(bucket: Any, endpoint: str, shards: Path, tmp_path: Path) -> None:
    counts = download(f"s3://data/{KEY}", tmp_path / "out", s3_endpoint=Secret.address(endpoint))
    assert bytes_of(tmp_path / "out") == bytes_of(shards)
    head = bucket.head_object(Bucket="data", Key=KEY)
    assert (counts["source"]["etag"], counts["source"]["length"]) == (head["ETag"], head["ContentLength"])


@pytest.mark.parametrize("profile", ["reader", "default"])
def test_a_profile_reads_what_is_private(
    bucket: Any, endpoint: str, shards: Path, tmp_path: Path, profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if profile == "reader":
        (tmp_path / "credentials").write_text("[reader]\naws_access_key_id = k\naws_secret_access_key = s\n")
    else:  # boto3's own search: here the environment
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    transport = {"s3_endpoint": Secret.address(endpoint), "s3_profile": profile}
    download(f"s3://private/{KEY}", tmp_path / "out", **transport)
    assert bytes_of(tmp_path / "out") == bytes_of(shards)


def test_what_is_wrong_is_said_in_one_line(bucket: Any, endpoint: str, tmp_path: Path) -> None:
    bucket.put_object(Bucket="data", Key="nothing.tar", Body=b"", ACL="public-read")
    for url, profile, words in (
        (f"s3://private/{KEY}", "", "access is denied, unsigned (HTTP 403 "),
        (f"s3://private/{KEY}", "", "check bucket and key, and s3_profile"),
        (f"s3://dada/{KEY}", "", f"there is no bucket dada at {endpoint}; check its name, and s3_endpoint"),
        ("s3://data/no.tar", "", f"bucket data has no such object at {endpoint}; check the key"),
        ("s3://data/nothing.tar", "", "is empty; check the key"),
        ("s3://No_Bucket!/x.tar", "", "check the address, s3_profile and s3_endpoint"),
        (f"s3://data/{KEY}", "nobody", "The config profile (nobody) could not be found; check the address, s3_profile"),
        (f"s3://data/{KEY}", "default", "Unable to locate credentials; check the address, s3_profile"),
    ):
        message = refused(url, tmp_path / "out", s3_endpoint=Secret.address(endpoint), s3_profile=profile)
        assert message.startswith(url[: url.index("/", 5) + 1]), message
        assert words in message


def test_a_server_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    for endpoint, words in (
        ("http://no-such-host.invalid", "no such host is known here (no-such-host.invalid); check bucket, s3_endpoint"),
        ("http://127.0.0.1:1", "Could not connect to the endpoint URL"),
        ("nonsense", "Invalid endpoint: nonsense; check the address, s3_profile and s3_endpoint"),
    ):
        message = refused("s3://data/x.tar", tmp_path / "out", s3_endpoint=Secret.address(endpoint))
        assert words in message


def test_a_bucket_in_another_region_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """AWS's answers, made by hand: moto has addresses for one region only."""
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
    store, asked = stages.transfer.s3.S3Store("data", profile="", endpoint=Secret(""), connections=1), []

    def answer(request: Any, **_: object) -> AWSResponse:
        asked.append(request.url)
        here = len(asked) > 1
        body = b"x" if here else b"<Error><Code>PermanentRedirect</Code></Error>"
        headers = {"content-range": "bytes 0-0/77", "etag": '"e"'} if here else {"x-amz-bucket-region": "us-west-2"}
        raw = HTTPResponse(io.BytesIO(body), preload_content=False)
        return AWSResponse(request.url, 206 if here else 301, headers, raw)

    store.client.meta.events.register("before-send.s3", answer)
    assert store.object("x.tar").head() == Version(77, '"e"', None, True)
    assert asked == [f"https://data.s3.{region}.amazonaws.com/x.tar" for region in ("eu-central-1", "us-west-2")]


def test_an_object_changed_between_two_reads_starts_over(
    bucket: Any, endpoint: str, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    new = pack(shards, "").read_bytes()

    def put(body: bytes) -> None:
        bucket.put_object(Bucket="data", Key="changing.tar", Body=body, ACL="public-read")

    put(bytes(reversed(new)))
    read, calls = stages.transfer.s3.S3Remote.read, []

    def spied(self: stages.transfer.s3.S3Remote, version: Any, start: int, stop: int) -> Any:
        calls.append(start)
        if len(calls) == 3:
            put(new)
        return read(self, version, start, stop)

    monkeypatch.setattr(stages.transfer.s3.S3Remote, "read", spied)
    download(
        "s3://data/changing.tar",
        tmp_path / "out",
        s3_endpoint=Secret.address(endpoint),
        connections=1,
    )
    assert bytes_of(tmp_path / "out") == bytes_of(shards)
    assert calls[:4] == [0, MIB, 2 * MIB, 0]
    assert "note: s3://data/changing.tar was changed while it was fetched" in capsys.readouterr().err


@pytest.mark.parametrize(
    "fault", [status(503, Retry_After="0"), status(500), status(429), cut(0), cut(300_000)],
    ids=["503", "500", "429", "cut at once", "cut late"],
)  # fmt: skip
def test_what_passes_is_tried_again(shards: Path, tmp_path: Path, fault: Fault) -> None:
    """Our test server speaks enough of S3 for this."""
    with serving(pack(shards, "").read_bytes(), f"/data/{KEY}") as web:
        web.faults.extend([fault] * 5)
        web.probe_faults.append(status(503))
        endpoint = web.url.removesuffix(f"/data/{KEY}")
        download(
            f"s3://data/{KEY}",
            tmp_path / "out",
            s3_endpoint=Secret.address(endpoint),
            connections=2,
        )
        assert bytes_of(tmp_path / "out") == bytes_of(shards)
        assert web.sent == len(web.data) + 1
        assert len(web.parts) == 4 + 5
        assert set(web.demands) == {web.etag}
        assert set(web.paths) == {f"/data/{KEY}"}


def test_a_stall_is_given_up_and_ranges_come_at_the_same_time(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages.transfer.s3, "READ_TIMEOUT_S", 2.0)
    meeting, never = threading.Barrier(3, timeout=30), threading.Event()
    with serving(pack(shards, "").read_bytes(), f"/data/{KEY}") as web:
        web.faults.extend([*[then(meeting.wait)] * 3, stall(never)])
        endpoint = web.url.removesuffix(f"/data/{KEY}")
        try:
            download(
                f"s3://data/{KEY}",
                tmp_path / "out",
                s3_endpoint=Secret.address(endpoint),
                connections=3,
            )
        finally:
            never.set()
        assert not meeting.broken
        assert len(web.parts) == 4 + 1
        assert bytes_of(tmp_path / "out") == bytes_of(shards)


def test_a_connection_below_the_least_rate_is_dropped(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    over = threading.Event()
    with serving(pack(shards, "").read_bytes(), f"/data/{KEY}") as web:
        web.faults.append(drip(0.005, over))
        endpoint = Secret.address(web.url.removesuffix(f"/data/{KEY}"))
        slow = {"low_speed_limit_bytes_per_s": 1000, "low_speed_time_s": 3}
        try:
            download(f"s3://data/{KEY}", tmp_path / "out", s3_endpoint=endpoint, connections=2, **slow)
        finally:
            over.set()
        assert bytes_of(tmp_path / "out") == bytes_of(shards)
        assert len(web.parts) == 4 + 1
    assert f"s3://data/{KEY}: it sent " in capsys.readouterr().err


def test_the_task_downloads_once_and_then_needs_no_network(bucket: Any, endpoint: str, tmp_path: Path) -> None:
    made = write_dataset(tmp_path / "made", [20, 3])
    bucket.upload_file(str(pack(made, "gz")), "private", "small.tar.gz")
    (tmp_path / "credentials").write_text("[reader]\naws_access_key_id = k\naws_secret_access_key = s\n")
    chain = Chain(tmp_path)
    words = ("DownloadDataset", "--phase", "1", "--Dataset-phase1-url", "s3://private/small.tar.gz")
    chain.run(*words, "--Dataset-s3-endpoint", endpoint, "--Dataset-s3-profile", "reader")
    assert bytes_of(chain.latest("download_dataset-phase1")) == bytes_of(made)
    counts: Any = chain.manifest("download_dataset-phase1")["counts"]
    assert counts["training_rows"] == 23
    assert counts["source"]["url"] == "s3://private/small.tar.gz"
    done = chain.run(*words, "--Dataset-s3-endpoint", "http://127.0.0.1:1")
    assert "started" not in done.stderr


def test_the_command_says_one_line(bucket: Any, endpoint: str, tmp_path: Path) -> None:
    done = forked("stages.download", f"s3://dada/{KEY}", "--out", tmp_path / "out", "--s3-endpoint", endpoint)
    assert_one_line_error(done, f"s3://dada/{KEY}: there is no bucket dada")
