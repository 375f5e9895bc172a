"""A store in S3 over HTTP: moto's server, behind a proxy that loses, cuts, delays and refuses."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import io
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.awsrequest import AWSResponse
from urllib3 import HTTPResponse

import stages.store.s3_requests
import stages.transfer.ranges
import stages.transfer.s3
from common.errors import UserError
from common.process import free_port
from common.secrets import Secret
from stages.store import maintenance
from stages.store.backend import Conflict, Missing
from stages.store.open import open_store
from tests.helpers.stores.s3 import S3, Fault, after, at_first, before, cut, drop, error, lose, slow, stall
from tests.stages.store.conftest import Bucket

PART = 100_000
#: One of three parts, the last of them short, and one of a single part.
LARGE, SMALL = os.urandom(2 * PART + 77), os.urandom(5000)


def check_read(bucket: Bucket, path: Path) -> None:
    etag = bucket.put("x", SMALL)
    assert bucket.store.read("x") == (SMALL, etag)
    with pytest.raises(Missing):
        bucket.store.read("y")


def check_write(bucket: Bucket, path: Path) -> None:
    version = bucket.store.write("x", b"one", replaces=None)
    with pytest.raises(Conflict):
        bucket.store.write("x", b"another", replaces=None)
    assert bucket.get("x") == b"one"
    bucket.store.write("x", b"two", replaces=version)
    with pytest.raises(Conflict):
        bucket.store.write("x", b"another", replaces=version)
    assert bucket.get("x") == b"two"


def check_delete(bucket: Bucket, path: Path) -> None:
    for key in "abc":
        bucket.put(key, b"")
    bucket.store.delete(["a", "c", "never"])
    assert bucket.keys() == ["b"]


def check_list(bucket: Bucket, path: Path) -> None:
    for number in range(30):
        bucket.put(f"objects/{number:02}", b"x" * number)
    found = {entry.key: entry.bytes for entry in bucket.store.list("objects/")}
    assert found == {f"objects/{number:02}": number for number in range(30)}


def check_present(bucket: Bucket, path: Path) -> None:
    bucket.put("objects/a", b"12")
    assert bucket.store.present(["objects/a", "objects/b"]) == {"objects/a": 2}
    assert bucket.store.present(["objects/a", *(f"objects/{number}" for number in range(200))]) == {"objects/a": 2}


def check_upload(data: bytes, bucket: Bucket, path: Path) -> None:
    assert bucket.upload(data, path) == len(data)
    assert bucket.get("objects/x") == data


def check_download(data: bytes, bucket: Bucket, path: Path) -> None:
    bucket.put("objects/x", data)
    assert bucket.download(data, path) == len(data)
    assert path.read_bytes() == data


def check_sweep(bucket: Bucket, path: Path) -> None:
    others = ["another/objects/z", "runs/store/model.safetensors"]
    for key in ("runs/store/objects/x", "runs/store/checkpoints/y", *others):
        bucket.client.create_multipart_upload(Bucket=bucket.name, Key=key)
    begun = bucket.client.list_multipart_uploads(Bucket=bucket.name)["Uploads"]
    first = min(one["Initiated"] for one in begun)
    assert bucket.store.sweep(first.timestamp()) == 0
    assert bucket.store.sweep(datetime.now(UTC).timestamp() + 5) == 2
    left = bucket.client.list_multipart_uploads(Bucket=bucket.name)["Uploads"]
    assert sorted(one["Key"] for one in left) == others


CHECKS: dict[str, Callable[[Bucket, Path], None]] = {
    "read": check_read, "write": check_write, "delete": check_delete, "list": check_list, "present": check_present,
    "upload": partial(check_upload, SMALL), "upload in parts": partial(check_upload, LARGE),
    "download": partial(check_download, SMALL), "download in parts": partial(check_download, LARGE),
    "sweep": check_sweep,
}  # fmt: skip
FAULTS: dict[str, Fault] = {
    "500": error(500, "InternalError"), "slow down": error(503, "SlowDown", Retry_After="0"),
    "a page of a load balancer": error(502, body=b"<html>Bad gateway</html>"), "dropped": drop, "lost": lose,
    "cut": cut(40), "cut XML": cut(200), "slow": slow(PART // 8, 0.01),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("operation", CHECKS)
def test_every_operation_survives_a_fault_of_each_of_its_requests(
    s3: S3, bucket: Bucket, tmp_path: Path, operation: str, fault: str
) -> None:
    s3.fail(FAULTS[fault], at_first(), times=1000)
    CHECKS[operation](bucket, tmp_path / "file")
    assert s3.failed


def test_a_write_whose_answer_was_lost_has_succeeded(s3: S3, bucket: Bucket) -> None:
    bucket.store.write("before", b"anything", replaces=None)  # probes the server
    sent = s3.count("put_object")
    s3.fail(lose, "put_object", times=2)
    first = bucket.store.write("x", b"one", replaces=None)
    assert (first, s3.count("put_object") - sent) == (bucket.head("x")["ETag"], 3)
    s3.fail(lose, "put_object")
    assert bucket.store.write("x", b"two", replaces=first) == bucket.head("x")["ETag"]
    assert bucket.get("x") == b"two"


@pytest.mark.parametrize("ignored", [("If-None-Match",), ("If-Match",), ("If-None-Match", "If-Match")])
def test_a_server_that_ignores_conditions_is_refused(bucket: Bucket, ignored: tuple[str, ...]) -> None:
    """As a server would that speaks S3 without them."""
    events = bucket.store._bucket.client.meta.events  # type: ignore[attr-defined]

    def leave_out(params: dict[str, object], **_: object) -> None:
        for name in ignored:
            params.pop(name.replace("-", ""), None)

    events.register("before-parameter-build.s3.PutObject", leave_out)
    with pytest.raises(
        UserError, match=f"this server ignores {' and '.join(ignored)}, which keeps two machines apart; use another"
    ):
        bucket.store.write("x", b"one", replaces=None)
    assert list(bucket.store.list("")) == []


@pytest.mark.parametrize(
    "fault",
    [
        after,
        lambda put: before(put, drop),
        lambda put: before(put, error(503, "SlowDown")),
        lambda put: before(put, error(409, "ConditionalRequestConflict")),
        lambda put: before(put, error(412, "PreconditionFailed")),
    ],
    ids=["lost", "dropped", "503", "409", "412"],
)
def test_another_writer_meanwhile_is_a_conflict(
    s3: S3, bucket: Bucket, fault: Callable[[Callable[[], object]], Fault]
) -> None:
    """It writes while our request, or the answer to it, is on its way."""
    version = bucket.put("x", b"zero")
    s3.fail(fault(lambda: bucket.put("x", b"another's")), "put_object")
    with pytest.raises(Conflict):
        bucket.store.write("x", b"ours", replaces=version)
    assert bucket.get("x") == b"another's"
    s3.fail(fault(lambda: bucket.put("y", b"another's")), "put_object")
    with pytest.raises(Conflict):
        bucket.store.write("y", b"ours", replaces=None)
    assert bucket.get("y") == b"another's"


def test_a_write_in_the_way_of_another_is_tried_again(s3: S3, bucket: Bucket) -> None:
    """S3 gives this answer even where the other has not changed the key."""
    for code in ("ConditionalRequestConflict", "OperationAborted"):
        s3.fail(error(409, code), "put_object", times=2)
    version = bucket.store.write("x", b"one", replaces=None)
    s3.fail(error(409, "ConditionalRequestConflict"), "put_object", times=2)
    bucket.store.write("x", b"two", replaces=version)
    assert bucket.get("x") == b"two"


def test_a_wrong_clock_is_one_line_that_says_to_set_it(s3: S3, bucket: Bucket) -> None:
    s3.fail(error(403, "RequestTimeTooSkewed"), "get_object")
    with pytest.raises(UserError, match=rf"s3://{bucket.name}/runs/store: the clock .* is wrong .*; set it$"):
        bucket.store.read("x")


@pytest.mark.parametrize("hours", [-1.0, 0.0, 1.0])
def test_a_wrong_clock_is_told_by_the_date_where_an_error_has_no_code(
    s3: S3, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, hours: float
) -> None:
    """As with HEAD, whose answers have no body."""
    monkeypatch.setattr(stages.store.s3_requests, "time", SimpleNamespace(time=lambda: time.time() + 3600 * hours))
    s3.fail(error(403, body=b""), "head_object")
    with pytest.raises(UserError, match=r"the clock .* is wrong .*; set it$" if hours else "access is denied"):
        bucket.store.present(["objects/x"])


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_what_is_sent_has_one_checksum_under_tls(
    bucket: Bucket, tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without TLS, the signature contains the body's checksum, too."""
    sent: list[Any] = []

    def answer(request: Any, **_: Any) -> AWSResponse:
        sent.append(request)
        return AWSResponse(request.url, 200, {"ETag": '"x"'}, HTTPResponse(io.BytesIO(), preload_content=False))

    store = open_store(dataclasses.replace(bucket.options, s3_endpoint=Secret.address(f"{scheme}://127.0.0.1:1")))
    store._bucket.client.meta.events.register("before-send.s3", answer)  # type: ignore[attr-defined]
    (tmp_path / "file").write_bytes(SMALL)
    sha256 = hashlib.sha256(SMALL)
    store.upload("objects/x", tmp_path / "file", len(SMALL), sha256.hexdigest(), [].append)
    (request,) = sent
    signed = {"http": sha256.hexdigest(), "https": "UNSIGNED-PAYLOAD"}[scheme]
    assert request.headers["X-Amz-Content-SHA256"] == signed.encode()
    assert request.headers["x-amz-checksum-sha256"] == base64.b64encode(sha256.digest())
    assert b"x-amz-checksum-sha256" in request.headers["Authorization"], "it is signed"


def test_what_is_wrong_is_said_in_one_line(s3: S3, bucket: Bucket, tmp_path: Path) -> None:
    def said(**changes: Any) -> str:
        with pytest.raises(UserError) as raised:
            open_store(dataclasses.replace(bucket.options, **changes)).read("x")
        assert "\n" not in str(raised.value)
        return str(raised.value)

    assert "there is no bucket nowhere at http" in said(url=Secret.address("s3://nowhere/x"))
    assert "Could not connect" in said(s3_endpoint=Secret.address(f"http://127.0.0.1:{free_port()}"))
    assert "no-such-host.invalid" in said(s3_endpoint=Secret.address("http://no-such-host.invalid"))
    assert "check the address, s3_profile and s3_endpoint" in said(s3_profile="nobody")
    for code in ("InvalidAccessKeyId", "SignatureDoesNotMatch", "AccessDenied"):
        s3.fail(error(403, code), "get_object")
        assert f"access is denied, with the credentials of profile default (HTTP 403 {code})" in said()
    s3.fail(error(500, "InternalError"), times=100)
    assert f"HTTP 500 (InternalError), {stages.transfer.ranges.TRIES} times in a row" in said()


def test_a_server_that_says_nothing_is_asked_again(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages.transfer.s3, "READ_TIMEOUT_S", 0.5)
    bucket = Bucket(s3)
    for operation in ("get_object", "put_object"):
        s3.fail(stall, operation)
    check_write(bucket, tmp_path)
    check_read(bucket, tmp_path)


def test_an_error_in_an_answer_that_began_well_is_tried_again(s3: S3, bucket: Bucket, tmp_path: Path) -> None:
    """S3 answers 200 at once when completing takes long, and sends the error afterwards."""
    s3.fail(error(200, "InternalError"), "complete_multipart_upload", times=2)
    s3.fail(error(200, body=b"<ListBucketResult><Contents><Key>a"), "list_objects_v2")
    check_upload(LARGE, bucket, tmp_path / "file")
    assert [entry.key for entry in bucket.store.list("")] == ["objects/x"]


def test_keys_that_the_server_could_not_delete_are_deleted_again(s3: S3, bucket: Bucket) -> None:
    bucket.put("x", b"")
    failed = b"<DeleteResult><Error><Key>runs/store/x</Key><Code>InternalError</Code></Error></DeleteResult>"
    s3.fail(error(200, body=failed), "delete_objects")
    bucket.store.delete(["x"])
    assert bucket.keys() == []


def test_an_empty_page_is_not_taken_for_the_end(s3: S3, bucket: Bucket) -> None:
    """As some servers send, midway through a listing."""
    keys = [f"objects/{number:03}" for number in range(150)]
    for key in keys[::2]:
        bucket.put(key, b"1234")
    page = b"<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>"
    s3.fail(error(200, body=page), "list_objects_v2")
    assert bucket.store.present(keys) == dict.fromkeys(keys[::2], 4)
    assert s3.failed == 1


def test_whoever_may_only_read_counts_ages_from_what_was_written_last(
    s3: S3, bucket: Bucket, capsys: pytest.CaptureFixture[str]
) -> None:
    s3.fail(error(403, "AccessDenied"), "put_object", times=100)
    for key in ("stages/a/1.json", "objects/aa/x"):
        bucket.put(key, b"1234")
    listed = bucket.client.list_objects_v2(Bucket=bucket.name)["Contents"]
    newest = max(entry["LastModified"] for entry in listed)
    assert maintenance.now_of(bucket.store) == newest.timestamp()
    said = capsys.readouterr().err
    assert "access is denied" in said
    assert said.endswith("; ages are counted from what was written last\n")
    assert not s3.count("delete_objects")


def test_2500_keys_take_three_requests(s3: S3, bucket: Bucket) -> None:
    from moto.s3.models import s3_backends

    keys = [f"objects/{number % 256:02x}/{number:05}" for number in range(2500)]
    for key in keys:
        s3_backends["123456789012"]["aws"].put_object(bucket.name, f"runs/store/{key}", b"")
    assert {entry.key for entry in bucket.store.list("objects/")} == set(keys)
    assert bucket.store.present([*keys[::2], "objects/never"]).keys() == set(keys[::2])
    bucket.store.delete(keys)
    assert [s3.count(name) for name in ("list_objects_v2", "delete_objects", "")] == [6, 3, 9]
    assert bucket.keys() == []


@pytest.mark.parametrize(
    "sent", [{"encryption": "AES256"}, {"encryption": "aws:kms"}, {"encryption": "aws:kms", "kms_key": "alias/ours"}]
)
def test_what_is_stored_is_encrypted_as_the_options_say(s3: S3, tmp_path: Path, sent: dict[str, str]) -> None:
    bucket = Bucket(s3, **sent)
    bucket.store.write("x", b"one", replaces=None)
    bucket.upload(SMALL, tmp_path / "file", "objects/small")
    bucket.upload(LARGE, tmp_path / "file", "objects/large")
    for key in ("x", "objects/small", "objects/large"):
        head = bucket.head(key)
        assert head["ServerSideEncryption"] == sent["encryption"]
        assert head.get("SSEKMSKeyId", "").endswith(sent.get("kms_key", ""))
        assert bucket.get(key) == {"x": b"one", "objects/small": SMALL, "objects/large": LARGE}[key]
