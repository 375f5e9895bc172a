"""Objects in S3 and S3-compatible stores, through boto3: unsigned, or with a profile's credentials."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator, Iterator
from typing import Any, NoReturn

from common.errors import UserError, one_line
from common.secrets import Secret, public_address
from stages.transfer.remote import (
    CONNECT_TIMEOUT_S,
    READ_TIMEOUT_S,
    Changed,
    Transient,
    Version,
    check_part,
    chunks_of,
    refuse_status,
    version_of,
)

#: Profile name that selects boto3's own credential search (environment, files, instance role).
DEFAULT_PROFILE = "default"


class S3Store:
    """A bucket and its client."""

    def __init__(self, bucket: str, *, profile: str, endpoint: Secret, connections: int) -> None:
        """An empty `profile` means unsigned requests, an empty `endpoint` AWS."""
        import boto3
        from botocore import UNSIGNED
        from botocore.config import Config

        self.bucket, self._profile, self._endpoint = bucket, profile, endpoint
        # Most S3-compatible servers address buckets by path.
        details: dict[str, Any] = {"addressing_style": "path"} if endpoint else {}
        if not endpoint.reveal().startswith("http://"):
            # Under TLS the checksum that is sent along, and signed, is enough: boto3 would hash each body once more.
            details["payload_signing_enabled"] = False
        config = Config(
            signature_version=None if profile else UNSIGNED,
            max_pool_connections=connections,
            connect_timeout=CONNECT_TIMEOUT_S,
            read_timeout=READ_TIMEOUT_S,
            retries={"total_max_attempts": 1},  # ranges.py retries
            s3=details,
            # A range of an object has no checksum of its own.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        with self.errors(f"s3://{bucket}/"):
            session = boto3.Session(profile_name=profile if profile not in ("", DEFAULT_PROFILE) else None)
            self.client: Any = session.client("s3", endpoint_url=endpoint.reveal() or None, config=config)

    def object(self, key: str) -> S3Remote:
        return S3Remote(self, key)

    @contextlib.contextmanager
    def errors(self, url: str, *, first: bool = True) -> Iterator[None]:
        """Translate boto3's errors to `Transient`, `Changed`, or a `UserError` that says what to check.

        `first`: no request has succeeded yet, so an unknown host is a wrong address, not an outage.
        """
        import botocore.exceptions as boto

        try:
            yield
        except boto.ClientError as error:
            self._refuse(url, error.response)
        except boto.EndpointConnectionError as error:
            from urllib3.exceptions import NameResolutionError

            if first and isinstance(error.kwargs.get("error"), NameResolutionError):
                raise UserError(
                    f"{url}: no such host is known here ({_host(str(error))}); check bucket, s3_endpoint and this "
                    f"machine's network"
                ) from error
            raise Transient(one_line(error)) from error
        except boto.SSLError as error:
            raise UserError(f"{url}: {one_line(error)}; check s3_endpoint and this machine's clock") from error
        except (boto.HTTPClientError, boto.ConnectionError, boto.IncompleteReadError) as error:
            raise Transient(one_line(error)) from error
        except (boto.BotoCoreError, ValueError) as error:  # parameters, profiles, credentials
            raise UserError(f"{url}: {one_line(error)}; check the address, s3_profile and s3_endpoint") from error
        except OSError as error:  # reading the body
            raise Transient(one_line(error)) from error

    def _refuse(self, url: str, response: dict[str, Any]) -> NoReturn:
        status: int = response["ResponseMetadata"]["HTTPStatusCode"]
        headers: dict[str, str] = response["ResponseMetadata"]["HTTPHeaders"]
        code: str = response["Error"].get("Code", "")
        refuse_status(status, headers, code)
        who = f"with the credentials of profile {self._profile}" if self._profile else "unsigned"
        where = f" at {self._endpoint}" if self._endpoint else ""
        if code == "NoSuchBucket":
            raise UserError(f"{url}: there is no bucket {self.bucket}{where}; check its name, and s3_endpoint")
        if status == 404:
            raise UserError(f"{url}: bucket {self.bucket} has no such object{where}; check the key")
        if status in (401, 403):
            raise UserError(
                f"{url}: access is denied, {who} (HTTP {status} {code}); S3 also says so of some keys that do not "
                f"exist: check bucket and key, and s3_profile"
            )
        message = " ".join(str(response["Error"].get("Message", "")).split())
        raise UserError(f"{url}: HTTP {status} {code} {message}; check the address, s3_profile and s3_endpoint")

    def get(self, key: str, url: str, *, first: bool, **conditions: str) -> dict[str, Any]:
        """Request the object; the caller reads the body."""
        with self.errors(url, first=first):
            answer: dict[str, Any] = self.client.get_object(Bucket=self.bucket, Key=key, **conditions)
        return answer


class S3Remote:
    """One object in a bucket."""

    def __init__(self, store: S3Store, key: str) -> None:
        self.url = public_address(f"s3://{store.bucket}/{key}")
        self._store, self._key = store, key

    def head(self) -> Version:
        """The current version, from a request for the first byte: errors of HEAD carry no reason."""
        try:
            answer = self._store.get(self._key, self.url, first=True, Range="bytes=0-0")
        except Changed as error:
            raise UserError(f"{self.url} is empty; check the key") from error
        answer["Body"].close()
        return version_of(self.url, *_status_and_headers(answer))

    def read(self, version: Version, start: int, stop: int) -> Generator[bytes, None, None]:
        conditions = {"IfMatch": version.etag} if version.etag else {}
        if version.ranges:
            conditions["Range"] = f"bytes={start}-{stop - 1}"
        answer = self._store.get(self._key, self.url, first=False, **conditions)
        body = answer["Body"]
        with contextlib.closing(body):
            check_part(*_status_and_headers(answer), version, start, stop)
            with self._store.errors(self.url, first=False):
                yield from chunks_of(body.read)


def _status_and_headers(answer: dict[str, Any]) -> tuple[int, dict[str, str]]:
    metadata = answer["ResponseMetadata"]
    return metadata["HTTPStatusCode"], metadata["HTTPHeaders"]


def _host(message: str) -> str:
    found = re.search(r"https?://([^/\"]+)", message)
    return found[1] if found else message
