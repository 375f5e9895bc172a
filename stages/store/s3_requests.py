"""Requests to S3, retried when they fail for a reason that may pass."""

from __future__ import annotations

import base64
import hashlib
import threading
import time
from collections.abc import Callable, Generator
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from common.console import log
from common.errors import UserError
from stages.store.backend import Conflict, Missing
from stages.store.options import StoreOptions
from stages.transfer.ranges import WORTH_BYTES, Tries
from stages.transfer.remote import Changed, Transient
from stages.transfer.s3 import S3Store

T = TypeVar("T")

#: Codes of errors that may pass though the status does not say so. 409: another write to the key is under way.
_AGAIN = ("RequestTimeout", "XAmzContentSHA256Mismatch", "BadDigest", "ConditionalRequestConflict", "OperationAborted")
#: Seconds by which a clock may be wrong.
_SKEW_S = 900.0


class S3Requests:
    """Requests to the bucket and prefix that the options name. `url`: its address, without secrets."""

    def __init__(self, options: StoreOptions) -> None:
        self.url = options.place
        bucket, _, prefix = self.url.removeprefix("s3://").partition("/")
        self._prefix = f"{prefix}/" if prefix else ""
        # Files and parts of files are moved at once: the threads of two pools share these connections.
        self._bucket = S3Store(
            bucket, profile=options.s3_profile, endpoint=options.s3_endpoint, connections=2 * options.connections
        )
        self._encryption: dict[str, str] = {}
        if options.encryption:
            self._encryption["ServerSideEncryption"] = options.encryption
        if options.kms_key:
            self._encryption["SSEKMSKeyId"] = options.kms_key

    def _pages(self, operation: str, prefix: str, marker: str) -> Generator[dict[str, Any], None, None]:
        more: dict[str, Any] = {}
        while True:
            asked = {"Prefix": prefix, **more}
            page = self._repeated("", lambda asked=asked: self._call(operation, "", **asked))  # type: ignore[misc]
            yield page
            if not page.get("IsTruncated"):
                return
            names = (marker, "UploadIdMarker") if marker == "KeyMarker" else (marker,)
            more = {name: page[f"Next{name}"] for name in names if page.get(f"Next{name}")}

    def _repeated(self, key: str, request: Callable[[], T], moved: Callable[[], int] = lambda: 0) -> T:
        """Call `request`, retrying after failures that may pass; `moved`: bytes so far. Raises `Missing`, `Conflict`,
        `UserError`."""
        tries = Tries(f"{self.url}/{key}".rstrip("/"), threading.Event(), lambda line: log(f"note: {line}"))
        while True:
            before = moved()
            try:
                with self._bucket.errors(f"{self.url}/{key}".rstrip("/"), first=False):
                    return request()
            except Transient as error:
                tries.failed(error, worth=moved() - before >= WORTH_BYTES)
            except Changed:
                raise Conflict(key) from None

    def _request(self, operation: str, key: str, **arguments: Any) -> dict[str, Any]:
        return self._call(operation, key, Key=self._prefix + key, **arguments)

    def _call(self, operation: str, key: str, **arguments: Any) -> dict[str, Any]:
        import botocore.exceptions as boto

        try:
            answer: dict[str, Any] = getattr(self._bucket.client, operation)(Bucket=self._bucket.bucket, **arguments)
        except boto.ClientError as error:
            code = error.response["Error"].get("Code", "")
            status = error.response["ResponseMetadata"]["HTTPStatusCode"]
            if status == 404 and code != "NoSuchBucket":
                raise Missing(key) from None
            if code == "RequestTimeTooSkewed" or (status == 403 and operation == "head_object" and _is_skewed(error)):
                raise UserError(f"{self.url}: the clock of this machine is wrong ({code}); set it") from error
            if code in _AGAIN:
                raise Transient(code) from error
            raise
        return answer


def base64_sha256(data: bytes) -> str:
    """The sha256 as S3 takes it along with data, which it then refuses if they do not match."""
    return base64.b64encode(hashlib.sha256(data).digest()).decode()


def _is_skewed(error: Any) -> bool:
    """Whether the response's date explains why a HEAD was refused; errors of HEAD have no code."""
    said = error.response["ResponseMetadata"]["HTTPHeaders"].get("date", "")
    try:
        return abs(parsedate_to_datetime(said).timestamp() - time.time()) > _SKEW_S
    except ValueError:
        return False
