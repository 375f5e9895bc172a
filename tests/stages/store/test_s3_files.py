"""Files in a store in S3, up and down, over connections and disks that fail."""

from __future__ import annotations

import dataclasses
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import stages.store.s3_files
import stages.transfer.ranges
from common.errors import DiskError, UserError
from stages.store.backend import Altered, Missing
from stages.store.s3_requests import base64_sha256
from stages.transfer.remote import LeastRate
from tests.conftest import Disk
from tests.helpers.stores.s3 import S3, Answer, Handler, before, cut, error, lose, slow
from tests.stages.store.conftest import Bucket

PART = 100_000
#: One of three parts, the last of them short, and one of a single part.
LARGE, SMALL = os.urandom(2 * PART + 77), os.urandom(5000)


def check_upload(bucket: Bucket, path: Path) -> None:
    assert bucket.upload(LARGE, path) == len(LARGE)
    assert bucket.get("objects/x") == LARGE


@pytest.mark.parametrize("ours", [True, False])
def test_an_upload_that_was_completed_before_has_succeeded(s3: S3, bucket: Bucket, tmp_path: Path, ours: bool) -> None:
    """By a request of ours whose answer was lost, or by another machine; S3 remembers it only for a while."""
    over = error(404, "NoSuchUpload")
    s3.fail(lose if ours else before(lambda: bucket.put("objects/x", LARGE), over), "complete_multipart_upload")
    s3.fail(over, "complete_multipart_upload")
    check_upload(bucket, tmp_path / "file")


@pytest.mark.parametrize("operation", ["list_parts", "upload_part"])
def test_an_upload_that_another_machine_completes_meanwhile_has_succeeded(
    s3: S3, bucket: Bucket, tmp_path: Path, operation: str
) -> None:
    key = {"Bucket": bucket.name, "Key": "runs/store/objects/x"}
    begun = bucket.client.create_multipart_upload(**key)["UploadId"]

    def complete() -> None:
        bucket.client.abort_multipart_upload(**key, UploadId=begun)
        bucket.put("objects/x", LARGE)

    s3.fail(before(complete, error(404, "NoSuchUpload")), operation)
    s3.fail(error(404, "NoSuchUpload"), operation, times=10)
    check_upload(bucket, tmp_path / "file")


def test_an_upload_that_was_removed_meanwhile_is_one_line(s3: S3, bucket: Bucket, tmp_path: Path) -> None:
    for operation in ("upload_part", "complete_multipart_upload"):
        s3.fail(error(404, "NoSuchUpload"), operation)
        with pytest.raises(UserError, match="its upload was removed; run the same again"):
            bucket.upload(LARGE, tmp_path / "file")
        s3.heal()
    check_upload(bucket, tmp_path / "file")


def test_another_object_under_the_key_is_no_completed_upload(s3: S3, bucket: Bucket, tmp_path: Path) -> None:
    """The store's keys have the sha256, so an object of another size is damaged."""
    bucket.put("objects/x", SMALL)
    s3.fail(error(404, "NoSuchUpload"), "complete_multipart_upload")
    with pytest.raises(UserError, match="its upload was removed; run the same again"):
        bucket.upload(LARGE, tmp_path / "file")


def test_an_earlier_file_of_a_published_name_is_no_completed_upload(s3: S3, bucket: Bucket, tmp_path: Path) -> None:
    """Not even one of the same size: the upload is begun anew, once."""
    name, over = "model.safetensors", error(404, "NoSuchUpload")
    for operation in ("upload_part", "complete_multipart_upload"):
        bucket.put(name, LARGE[::-1])
        s3.fail(over, operation)
        assert bucket.upload(LARGE, tmp_path / "file", name) == len(LARGE)
        assert bucket.get(name) == LARGE
    bucket.put(name, LARGE[::-1])
    s3.fail(over, "complete_multipart_upload", times=2)
    with pytest.raises(UserError, match=f"{name}: its upload was removed; run the same again"):
        bucket.upload(LARGE, tmp_path / "file", name)
    assert bucket.get(name) == LARGE[::-1]


def test_an_interrupted_upload_goes_on_with_the_parts_that_are_missing(s3: S3, tmp_path: Path) -> None:
    bucket, data = Bucket(s3, connections=2), os.urandom(12 * PART - 5)
    s3.fail(error(500), lambda request: request.query.get("partNumber") == "7", times=100)
    with pytest.raises(UserError, match="7 times in a row"):
        bucket.upload(data, tmp_path / "file")
    there = {request.query["partNumber"] for request in s3.requests if request.operation == "upload_part"} - {"7"}
    assert len(there) >= 6
    assert bucket.keys() == []
    s3.heal()
    s3.requests.clear()
    assert bucket.upload(data, tmp_path / "file") == len(data)
    sent = sorted(request.query["partNumber"] for request in s3.requests if request.operation == "upload_part")
    assert sent == sorted({str(number) for number in range(1, 13)} - there)
    assert s3.count("create_multipart_upload") == 0
    assert bucket.get("objects/x") == data


def test_parts_of_another_content_are_sent_again(s3: S3, bucket: Bucket, tmp_path: Path) -> None:
    key = {"Bucket": bucket.name, "Key": "runs/store/objects/x"}
    begun = bucket.client.create_multipart_upload(**key)["UploadId"]
    for number, data in ((1, LARGE[:PART]), (2, b"other"), (3, b"other")):
        bucket.client.upload_part(**key, UploadId=begun, PartNumber=number, Body=data)
    check_upload(bucket, tmp_path / "file")
    assert s3.count("upload_part") == 2


def replaced(data: bytes, what: dict[bytes, bytes]) -> bytes:
    for old, new in what.items():
        data = data.replace(old, new)
    return data


def test_parts_are_known_by_their_checksums_where_an_etag_is_no_md5(s3: S3, bucket: Bucket, tmp_path: Path) -> None:
    """As under KMS: in the list of parts ETags are reversed, and the checksums that S3 lists are added."""
    etags: list[bytes] = []

    def list_parts(handler: Handler) -> None:
        answer = handler.forward()
        etags.extend(re.findall(rb"[0-9a-f]{32}", answer.body))
        body = replaced(answer.body, {etag: etag[::-1] for etag in etags})
        for number, start in ((1, 0), (2, PART)):
            tag, checksum = b"<PartNumber>%d</PartNumber>" % number, base64_sha256(LARGE[start : start + PART])
            body = body.replace(tag, tag + f"<ChecksumSHA256>{checksum}</ChecksumSHA256>".encode())
        handler.answer(Answer(answer.status, [], body))

    def complete(handler: Handler) -> None:
        body = replaced(handler.request_made.body, {etag[::-1]: etag for etag in etags})
        handler.request_made = dataclasses.replace(handler.request_made, body=body)
        handler.answer(handler.forward())

    s3.fail(error(500), lambda request: request.query.get("partNumber") == "3", times=7)
    with pytest.raises(UserError, match="7 times in a row"):
        bucket.upload(LARGE, tmp_path / "file")
    s3.requests.clear()
    s3.fail(list_parts, "list_parts")
    s3.fail(complete, "complete_multipart_upload")
    check_upload(bucket, tmp_path / "file")
    assert s3.count("upload_part") == 1


def test_large_files_share_the_connections(s3: S3, tmp_path: Path) -> None:
    """Six files of three parts at once; a part takes longer than everything around it."""
    bucket = Bucket(s3, connections=3)
    s3.fail(slow(PART, 0.05), lambda request: request.operation in ("upload_part", "get_object"), times=1000)

    def move(number: int) -> None:
        path = tmp_path / str(number)
        bucket.upload(LARGE, path, f"objects/{number}")
        path.unlink()
        bucket.download(LARGE, path, f"objects/{number}")
        assert path.read_bytes() == LARGE

    with ThreadPoolExecutor(bucket.store.connections) as threads:
        list(threads.map(move, range(6)))
    assert 2 <= s3.peak <= 2 * bucket.store.connections


def test_a_connection_that_is_cut_again_and_again_gets_on(
    s3: S3, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages.store.s3_files, "PART_BYTES", 1 << 24)
    data = os.urandom(3_100_000)
    s3.fail(cut(300_000), "get_object", times=100)
    bucket.put("objects/x", data)
    assert bucket.download(data, tmp_path / "file") == len(data)
    assert (tmp_path / "file").read_bytes() == data
    assert s3.count("get_object") == 11


def test_a_connection_below_the_least_rate_is_dropped(
    s3: S3, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that sends a byte often enough that no read times out; a read of the next 256 would take 2.5 s."""
    monkeypatch.setattr(stages.store.s3_files, "_LEAST", LeastRate(1000, 0.5))
    bucket.put("objects/x", SMALL)
    s3.fail(slow(1, 0.01), "get_object")
    assert bucket.download(SMALL, tmp_path / "file") == len(SMALL)
    assert (tmp_path / "file").read_bytes() == SMALL
    assert s3.count("get_object") >= 2
    assert "objects/x: it sent 0 bytes in 0.5 s, less than 1000 bytes/s; trying again in" in capsys.readouterr().err


def test_a_server_that_stays_too_slow_is_given_up_in_one_line(
    s3: S3, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages.store.s3_files, "_LEAST", LeastRate(1000, 0.2))
    bucket.put("objects/x", SMALL)
    s3.fail(slow(1, 0.01), "get_object", times=100)
    with pytest.raises(UserError, match="less than 1000 bytes/s, 7 times in a row; check network and server"):
        bucket.download(SMALL, tmp_path / "file")
    assert not (tmp_path / "file").exists()


def test_after_an_error_no_more_parts_are_asked_for(s3: S3, tmp_path: Path) -> None:
    bucket, data = Bucket(s3, connections=2), bytes(40 * PART)
    bucket.put("objects/x", data)
    s3.fail(error(500), "get_object", times=1000)
    with pytest.raises(UserError, match="7 times in a row"):
        bucket.download(data, tmp_path / "file")
    assert not (tmp_path / "file").exists()
    assert s3.count("get_object") <= 2 * 2 * stages.transfer.ranges.TRIES


@pytest.mark.parametrize("free", [0, 40, 96, 160])
def test_a_full_disk_says_so_and_leaves_no_file(bucket: Bucket, disk: Disk, free: int) -> None:
    """Even where the last block written fits in part."""
    disk.resize(164)
    (disk.path / "other").write_bytes(bytes((164 - free) << 10))
    for data in (LARGE, LARGE[: free << 10] + SMALL):
        bucket.put("objects/x", data)
        with pytest.raises(DiskError, match="No space left"):
            bucket.download(data, disk.path / "file")
        assert [path.name for path in disk.path.iterdir()] == ["other"]


@pytest.mark.parametrize("data", [LARGE, SMALL, b""], ids=["parts", "one part", "empty"])
def test_other_bytes_than_expected_are_refused_and_leave_no_file(bucket: Bucket, tmp_path: Path, data: bytes) -> None:
    other = [data + b"x", b"x" + data, *([data[::-1], data[:-1], data[: len(data) // 2], b""] if data else [])]
    for stored in other:
        bucket.put("objects/x", stored)
        with pytest.raises(Altered):
            bucket.download(data, tmp_path / "file")
        assert not (tmp_path / "file").exists()
    bucket.store.delete(["objects/x"])
    with pytest.raises(Missing):
        bucket.download(data, tmp_path / "file")
    assert not (tmp_path / "file").exists()
