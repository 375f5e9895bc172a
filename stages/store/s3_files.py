"""Files to and from S3: large ones in parts, several at a time; if interrupted, they continue with what is missing."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from common.errors import UserError
from common.files import disk_errors, failpoint, sha256_of
from common.threads import beside
from stages.store.backend import Altered, Conflict, Missing, Report
from stages.store.digest import HashBehind
from stages.store.options import StoreOptions
from stages.store.records import is_ours
from stages.store.s3_requests import S3Requests, base64_sha256
from stages.transfer.remote import LeastRate, Transient, chunks_of

T = TypeVar("T")

#: Bytes of a part of a large file; S3 allows 10,000 parts, of 5 MiB or more.
PART_BYTES, _PARTS_MAX = 16 << 20, 10_000
#: Seconds for which a listing of unfinished uploads is reused: many large files need only one.
_LISTED_S = 60.0
#: A download below this rate is dropped, and what is missing requested again.
_LEAST = LeastRate()


class S3Files(S3Requests):
    def __init__(self, options: StoreOptions) -> None:
        super().__init__(options)
        self.connections = options.connections
        #: Held while a part is moved: across all large files, at most `connections` parts are moved at a time.
        self._part = threading.BoundedSemaphore(options.connections)
        #: Unfinished uploads, id by key, and when they were listed.
        self._begun: dict[str, str] = {}
        self._listed = float("-inf")
        self._begun_lock = threading.Lock()

    def size_of(self, key: str) -> int | None:
        """Bytes of an object; None if there is none."""
        try:
            size: int = self._repeated(key, lambda: self._request("head_object", key))["ContentLength"]
        except Missing:
            return None
        return size

    def upload(self, key: str, path: Path, size: int, sha256: str, report: Report) -> None:
        if path.stat().st_size != size:
            raise Altered(key)
        if size > PART_BYTES:
            if sha256_of(path) != sha256:
                raise Altered(key)
            moved: list[int] = []
            try:
                self._upload_parts(key, path, size, moved.append, report)
            except Missing:  # completed by a request whose answer was lost, or by another machine
                self._forget_upload(key)
                self._require_uploaded(key, path, size)
                report(size - sum(moved))
            return
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != sha256:
            raise Altered(key)
        checked = {"ChecksumSHA256": base64.b64encode(bytes.fromhex(sha256)).decode(), **self._encryption}
        self._repeated(key, lambda: self._request("put_object", key, Body=data, **checked))
        report(size)

    def _require_uploaded(self, key: str, path: Path, size: int) -> None:
        """For an upload that was over before it was completed here. Raises `UserError` if the file is not there."""
        removed = UserError(f"{self.url}/{key}: its upload was removed; run the same again")
        if is_ours(key):  # the key has the sha256
            if self.size_of(key) != size:
                raise removed from None
            return
        try:  # under a plain name there may be an earlier file, even of this size
            self._upload_parts(key, path, size)
        except Missing:
            self._forget_upload(key)
            raise removed from None

    def _upload_parts(self, key: str, path: Path, size: int, *reports: Report) -> None:
        """Upload a large file in parts; those that an earlier, interrupted upload has sent are not sent again.

        Raises `Missing` if the upload is over before it is completed here.
        """
        part_bytes = max(PART_BYTES, -(-size // _PARTS_MAX))
        upload, there = self._begun_upload(key)
        starts = list(range(0, size, part_bytes))

        def send(number: int) -> dict[str, Any]:
            with path.open("rb") as file:
                file.seek(starts[number - 1])
                data = file.read(part_bytes)
            same, checksum = there.get(number), base64_sha256(data)
            if same is None or not _holds(same, data, checksum):
                ids = {"UploadId": upload, "PartNumber": number, "ChecksumSHA256": checksum}
                same = self._repeated(key, lambda: self._request("upload_part", key, Body=data, **ids))
                failpoint(f"store-part:{number}")
            for report in reports:
                report(len(data))
            return {"PartNumber": number, "ETag": same["ETag"], "ChecksumSHA256": checksum}

        parts = self._in_parallel(send, range(1, len(starts) + 1))
        if path.stat().st_size != size:
            raise Altered(key)
        complete = {"UploadId": upload, "MultipartUpload": {"Parts": parts}}
        self._repeated(key, lambda: self._request("complete_multipart_upload", key, **complete))
        self._forget_upload(key)

    def _in_parallel(self, move: Callable[[Any], T], pieces: Sequence[Any]) -> Sequence[T]:
        """Call `move` for each part of a large file; after an error, no more calls are started."""

        def one(piece: Any) -> T:
            with self._part:
                return move(piece)

        with ThreadPoolExecutor(self.connections) as threads:
            return list(threads.map(one, pieces))

    def _begun_upload(self, key: str) -> tuple[str, dict[int, dict[str, Any]]]:
        """The id of an unfinished upload of this key, or else of a new one, and its parts by number."""
        with self._begun_lock:
            if time.monotonic() - self._listed > _LISTED_S:
                self._begun = {found["Key"][len(self._prefix) :]: found["UploadId"] for found in self._unfinished()}
                self._listed = time.monotonic()
            upload = self._begun.get(key)
        if upload is not None:
            return upload, {part["PartNumber"]: part for part in self._parts(key, upload)}
        begin = {"ChecksumAlgorithm": "SHA256", **self._encryption}
        new: str = self._repeated(key, lambda: self._request("create_multipart_upload", key, **begin))["UploadId"]
        with self._begun_lock:
            self._begun[key] = new
        return new, {}

    def _forget_upload(self, key: str) -> None:
        with self._begun_lock:
            self._begun.pop(key, None)

    def _unfinished(self) -> Iterator[dict[str, Any]]:
        """All uploads that were begun but not completed, 1,000 per request."""
        for page in self._pages("list_multipart_uploads", self._prefix, "KeyMarker"):
            yield from page.get("Uploads", ())

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

        def fetch(span: tuple[int, int]) -> None:
            self._fetch(key, path, *span, size, report)
            behind.wrote(*span)

        try:
            with disk_errors(path), path.open("xb") as file, HashBehind(path, size) as behind:
                os.ftruncate(file.fileno(), size)
                if len(spans) == 1:
                    fetch(spans[0])
                elif spans:
                    self._in_parallel(fetch, spans)
                elif self._repeated(key, lambda: self._request("head_object", key))["ContentLength"]:
                    raise Altered(key)
                os.fsync(file.fileno())
                if behind.sha256() != sha256:
                    raise Altered(key)
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def _fetch(self, key: str, path: Path, start: int, stop: int, size: int, report: Report) -> None:
        """Write bytes [start, stop) of an object of this size to the file; continues where a connection has ended."""
        at = start

        def get() -> None:
            nonlocal at
            answer = self._request("get_object", key, Range=f"bytes={at}-{stop - 1}")
            body = answer["Body"]
            with body as raw, _no_slower(_LEAST, lambda: at, raw.shutdown):
                if not answer.get("ContentRange", f"/{answer['ContentLength']}").endswith(f"/{size}"):
                    raise Altered(key)
                for data in chunks_of(body.read):
                    if len(data) > stop - at:
                        raise Altered(key)
                    with disk_errors(path):
                        left = memoryview(data)
                        file.seek(at)
                        while left:  # an almost full disk takes only a part
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
        for found in self._unfinished():
            key, ids = found["Key"][len(self._prefix) :], {"UploadId": found["UploadId"]}
            if is_ours(key) and found["Initiated"].timestamp() < before:
                with contextlib.suppress(Missing):
                    self._repeated(key, lambda k=key, ids=ids: self._request("abort_multipart_upload", k, **ids))  # type: ignore[misc]
                swept += 1
        return swept


def _holds(part: dict[str, Any], data: bytes, checksum: str) -> bool:
    """Whether a part that the store lists has these bytes. Servers that list no checksum give its MD5 as the ETag,
    except where KMS encrypts."""
    if "ChecksumSHA256" in part:
        return bool(part["ChecksumSHA256"] == checksum)
    return bool(part["ETag"].strip('"') == hashlib.md5(data, usedforsecurity=False).hexdigest())


@contextlib.contextmanager
def _no_slower(least: LeastRate, at: Callable[[], int], end: Callable[[], None]) -> Iterator[None]:
    """Raise `Transient` if the block, which reads up to byte `at()`, falls below the least rate: the read timeout
    restarts with each byte. `end` wakes a read that blocks."""
    slow: list[Transient] = []

    def watch(over: threading.Event) -> None:
        before = at()
        while not over.wait(least.time_s):
            now = at()
            if now - before < least.bytes_per_s * least.time_s:
                came = f"{now - before:,} bytes in {least.time_s:g} s"
                slow.append(Transient(f"it sent {came}, less than {least.bytes_per_s:g} bytes/s"))
                with contextlib.suppress(RuntimeError, ValueError):  # it has just ended by itself
                    end()
                return
            before = now

    try:
        with beside(watch):
            yield
    except Exception as error:
        if slow:
            raise slow[0] from error
        raise
