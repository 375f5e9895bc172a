"""A store in S3, or on a server that speaks S3 and knows conditional writes (If-Match, If-None-Match)."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import os
import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from common.errors import UserError
from common.files import disk_errors, failpoint, sha256_of
from stages.store.backend import Altered, Conflict, Entry, Missing, Report
from stages.store.options import StoreOptions
from stages.store.s3_requests import S3Requests
from stages.transfer.remote import Transient, chunks_of

T = TypeVar("T")

#: Bytes of a part of a large file; S3 allows 10,000 parts, of 5 MiB or more.
PART_BYTES, _PARTS_MAX = 16 << 20, 10_000
#: Above so many keys the objects are listed, 1,000 to a request, instead of asked for one by one.
_LIST_ABOVE = 100
#: Objects that S3 deletes in one request.
_DELETE_AT_ONCE = 1000


class S3Backend(S3Requests):
    """Every request is repeated as `stages.transfer.ranges.Tries` allows, whatever failed on the way."""

    def __init__(self, options: StoreOptions) -> None:
        super().__init__(options)
        self.connections = options.connections
        #: Held while a part is moved: those of all large files together are `connections` at a time.
        self._part = threading.BoundedSemaphore(options.connections)

    def read(self, key: str) -> tuple[bytes, str]:
        def get() -> tuple[bytes, str]:
            answer = self._request("get_object", key)
            with contextlib.closing(answer["Body"]) as body:
                return body.read(), answer["ETag"]

        return self._repeated(key, get)

    def write(self, key: str, data: bytes, *, replaces: str | None) -> str:
        self._require_conditions()
        return self._write(key, data, replaces)

    def _write(self, key: str, data: bytes, replaces: str | None) -> str:
        condition = {"IfNoneMatch": "*"} if replaces is None else {"IfMatch": replaces}

        def put() -> str:
            etag: str = self._request("put_object", key, Body=data, **condition, **self._encryption)["ETag"]
            return etag

        try:
            return self._repeated(key, put)
        except (Conflict, Missing):
            # The answer to a write that succeeded may have been lost, and the write repeated.
            with contextlib.suppress(Missing):
                now, version = self.read(key)
                if now == data:
                    return version
            raise Conflict(key) from None

    @functools.cache  # noqa: B019 - one store a process
    def _require_conditions(self) -> None:
        """Raise `UserError` for a server that ignores the conditions of writes: two machines could both have a turn."""
        key = f"probe/{uuid.uuid4().hex}"
        self._write(key, b"first", None)
        try:
            self._write(key, b"second", None)
        except Conflict:
            return
        finally:
            self.delete([key])
        raise UserError(f"{self.url}: this server ignores If-None-Match, which keeps two machines apart; use another")

    def delete(self, keys: Collection[str]) -> None:
        for some in _batches(list(keys), _DELETE_AT_ONCE):
            objects = {"Objects": [{"Key": self._prefix + key} for key in some], "Quiet": True}

            def delete(objects: dict[str, Any] = objects) -> None:
                answer = self._call("delete_objects", "", Delete=objects)
                for error in answer.get("Errors", ()):
                    said = f"{error.get('Key')} was not deleted: {error.get('Code')}"
                    if error.get("Code") in ("InternalError", "SlowDown"):
                        raise Transient(said)
                    raise UserError(f"{self.url}: {said}; check the permissions")

            self._repeated("", delete)

    def list(self, prefix: str) -> Iterator[Entry]:
        for page in self._pages("list_objects_v2", self._prefix + prefix, "ContinuationToken"):
            for found in page.get("Contents", ()):
                yield Entry(found["Key"][len(self._prefix) :], found["Size"], found["LastModified"].timestamp())

    def present(self, keys: Collection[str]) -> set[str]:
        if len(keys) > _LIST_ABOVE:
            wanted = set(keys)
            common = os.path.commonprefix(list(wanted)).rpartition("/")[0]
            return {entry.key for entry in self.list(f"{common}/" if common else "") if entry.key in wanted}
        with ThreadPoolExecutor(self.connections) as threads:
            return {key for key, there in zip(keys, threads.map(self._is_there, keys), strict=True) if there}

    def _is_there(self, key: str) -> bool:
        try:
            self._repeated(key, lambda: self._request("head_object", key))
        except Missing:
            return False
        return True

    def upload(self, key: str, path: Path, size: int, sha256: str, report: Report) -> None:
        if path.stat().st_size != size or sha256_of(path) != sha256:
            raise Altered(key)
        if size > PART_BYTES:
            moved: list[int] = []
            try:
                self._upload_parts(key, path, size, moved.append, report)
            except Missing:  # completed by a request whose answer was lost, or by another machine
                if not self._is_there(key):
                    raise UserError(f"{self.url}/{key}: its upload was removed; run the same again") from None
                report(size - sum(moved))
            return
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != sha256:
            raise Altered(key)
        checked = {"ChecksumSHA256": _base64_sha256(data), **self._encryption}
        self._repeated(key, lambda: self._request("put_object", key, Body=data, **checked))
        report(size)

    def _upload_parts(self, key: str, path: Path, size: int, *reports: Report) -> None:
        """Upload a large file in parts; those that an earlier, interrupted upload has brought are not sent again.

        Raises `Missing` if the upload is over before it is completed here.
        """
        part_bytes = max(PART_BYTES, -(-size // _PARTS_MAX))
        upload, there = self._begun_upload(key)
        starts = list(range(0, size, part_bytes))

        def send(number: int) -> dict[str, Any]:
            with path.open("rb") as file:
                file.seek(starts[number - 1])
                data = file.read(part_bytes)
            same = there.get(number)
            # An ETag is the MD5 of the part, except where KMS encrypts: then each part is sent again.
            if same is None or same["ETag"].strip('"') != hashlib.md5(data, usedforsecurity=False).hexdigest():
                ids = {"UploadId": upload, "PartNumber": number, "ChecksumSHA256": _base64_sha256(data)}
                same = self._repeated(key, lambda: self._request("upload_part", key, Body=data, **ids))
                failpoint(f"store-part:{number}")
            for report in reports:
                report(len(data))
            return {"PartNumber": number, "ETag": same["ETag"], "ChecksumSHA256": _base64_sha256(data)}

        parts = self._in_parallel(send, range(1, len(starts) + 1))
        if path.stat().st_size != size:
            raise Altered(key)
        complete = {"UploadId": upload, "MultipartUpload": {"Parts": parts}}
        self._repeated(key, lambda: self._request("complete_multipart_upload", key, **complete))

    def _in_parallel(self, move: Callable[[Any], T], pieces: Sequence[Any]) -> Sequence[T]:
        """`move` for each part of a large file; after an error no more are begun."""

        def one(piece: Any) -> T:
            with self._part:
                return move(piece)

        with ThreadPoolExecutor(self.connections) as threads:
            return list(threads.map(one, pieces))

    def _begun_upload(self, key: str) -> tuple[str, dict[int, dict[str, Any]]]:
        """The id of an unfinished upload of this key, else of a new one, and its parts by number."""
        for page in self._pages("list_multipart_uploads", self._prefix + key, "KeyMarker"):
            for found in page.get("Uploads", ()):
                if found["Key"] == self._prefix + key:
                    upload: str = found["UploadId"]
                    return upload, {part["PartNumber"]: part for part in self._parts(key, upload)}
        begin = {"ChecksumAlgorithm": "SHA256", **self._encryption}
        return self._repeated(key, lambda: self._request("create_multipart_upload", key, **begin))["UploadId"], {}

    def _parts(self, key: str, upload: str) -> Iterator[dict[str, Any]]:
        more: dict[str, Any] = {}
        while True:
            asked = {"UploadId": upload, **more}
            page = self._repeated(key, lambda asked=asked: self._request("list_parts", key, **asked))  # type: ignore[misc]
            yield from page.get("Parts", ())
            if not page.get("IsTruncated"):
                return
            more = {"PartNumberMarker": page["NextPartNumberMarker"]}

    def download(self, key: str, path: Path, size: int, sha256: str, report: Report) -> None:
        spans = [(start, min(start + PART_BYTES, size)) for start in range(0, size, PART_BYTES)]
        try:
            with disk_errors(path), path.open("xb") as file:
                os.ftruncate(file.fileno(), size)
                if len(spans) == 1:
                    self._fetch(key, path, *spans[0], size, report)
                elif spans:
                    self._in_parallel(lambda span: self._fetch(key, path, span[0], span[1], size, report), spans)
                elif self._repeated(key, lambda: self._request("head_object", key))["ContentLength"]:
                    raise Altered(key)
                os.fsync(file.fileno())
            if sha256_of(path) != sha256:
                raise Altered(key)
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def _fetch(self, key: str, path: Path, start: int, stop: int, size: int, report: Report) -> None:
        """Write bytes [start, stop) of an object of this size to the file; goes on where a connection has ended."""
        at = start

        def get() -> None:
            nonlocal at
            answer = self._request("get_object", key, Range=f"bytes={at}-{stop - 1}")
            with contextlib.closing(answer["Body"]) as body:
                if not answer.get("ContentRange", f"/{answer['ContentLength']}").endswith(f"/{size}"):
                    raise Altered(key)
                for data in chunks_of(body.read):
                    if len(data) > stop - at:
                        raise Altered(key)
                    with disk_errors(path):
                        left = memoryview(data)
                        file.seek(at)
                        while left:  # a disk that is almost full takes a part
                            left = left[file.write(left) :]
                    at += len(data)
                    report(len(data))
            if at < stop:
                raise Transient(f"the connection ended {stop - at:,} bytes too early")

        try:
            with disk_errors(path), path.open("r+b", buffering=0) as file:
                self._repeated(key, get, lambda: at)
        except Conflict:  # HTTP 416: the object is shorter
            raise Altered(key) from None

    def sweep(self, before: float) -> int:
        swept = 0
        for page in self._pages("list_multipart_uploads", self._prefix, "KeyMarker"):
            for found in page.get("Uploads", ()):
                if found["Initiated"].timestamp() < before:
                    key = found["Key"][len(self._prefix) :]
                    with contextlib.suppress(Missing):
                        ids = {"UploadId": found["UploadId"]}
                        self._repeated(key, lambda k=key, ids=ids: self._request("abort_multipart_upload", k, **ids))  # type: ignore[misc]
                    swept += 1
        return swept


def _batches(keys: list[str], size: int) -> Iterator[list[str]]:
    return (keys[at : at + size] for at in range(0, len(keys), size))


def _base64_sha256(data: bytes) -> str:
    return base64.b64encode(hashlib.sha256(data).digest()).decode()
