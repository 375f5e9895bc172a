"""A store in S3, or on a server that speaks S3 and supports conditional writes (If-Match, If-None-Match)."""

from __future__ import annotations

import bisect
import contextlib
import functools
import os
import uuid
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from common.errors import UserError
from stages.store.backend import Conflict, Entry, Missing
from stages.store.records import PROBES
from stages.store.s3_files import S3Files
from stages.store.s3_requests import base64_sha256
from stages.transfer.remote import Transient

#: Above this many keys, the objects are listed, 1,000 per request, instead of being queried one by one.
_LIST_ABOVE = 100
#: A page of a listing takes as long and costs as much as about this many requests for one object.
_WORTH_A_PAGE = 20
#: Objects that S3 deletes in one request.
_DELETE_AT_ONCE = 1000


class S3Backend(S3Files):
    """Every request is retried as `stages.transfer.ranges.Tries` allows, whatever failed on the way."""

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
        checked = {"ChecksumSHA256": base64_sha256(data), **self._encryption}

        def put() -> str:
            etag: str = self._request("put_object", key, Body=data, **condition, **checked)["ETag"]
            return etag

        try:
            return self._repeated(key, put)
        except (Conflict, Missing):
            # The response to a successful write may have been lost, and the write repeated.
            with contextlib.suppress(Missing):
                now, version = self.read(key)
                if now == data:
                    return version
            raise Conflict(key) from None

    @functools.cache  # noqa: B019 - one store a process
    def _require_conditions(self) -> None:
        """Raise `UserError` for a server that ignores write conditions: two machines could then hold the same lease."""
        key, ignored = f"{PROBES}/{uuid.uuid4().hex}", []
        self._write(key, b"first", None)
        try:
            for name, replaces in (("If-None-Match", None), ("If-Match", f'"{"0" * 32}"')):
                with contextlib.suppress(Conflict):
                    self._write(key, name.encode(), replaces)
                    ignored.append(name)
        finally:
            self.delete([key])
        if ignored:
            raise UserError(
                f"{self.url}: this server ignores {' and '.join(ignored)}, which keeps two machines apart; use another"
            )

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

    def present(self, keys: Collection[str]) -> dict[str, int]:
        rest, found = sorted(set(keys)), dict[str, int]()
        directory = os.path.commonprefix(rest).rpartition("/")[0]
        prefix = self._prefix + (f"{directory}/" if directory else "")
        is_worth_it = len(rest) > _LIST_ABOVE
        while rest and is_worth_it:
            # Start at the next wanted key: a page then tells more than one request, however large the store is.
            asked = {"Prefix": prefix, "StartAfter": self._prefix + rest[0][:-1]}
            page = self._repeated("", lambda asked=asked: self._call("list_objects_v2", "", **asked))  # type: ignore[misc]
            listed = {entry["Key"][len(self._prefix) :]: entry["Size"] for entry in page.get("Contents", ())}
            told = bisect.bisect_right(rest, max(listed, default="")) if page.get("IsTruncated") else len(rest)
            found |= {key: listed[key] for key in rest[:told] if key in listed}
            rest, is_worth_it = rest[told:], told >= _WORTH_A_PAGE
        with ThreadPoolExecutor(self.connections) as threads:
            sizes = zip(rest, threads.map(self.size_of, rest), strict=True)
            return found | {key: size for key, size in sizes if size is not None}


def _batches(keys: list[str], size: int) -> Iterator[list[str]]:
    return (keys[at : at + size] for at in range(0, len(keys), size))
