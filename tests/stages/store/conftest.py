"""A store in S3: moto's server, behind a proxy that tests make misbehave."""

from __future__ import annotations

import functools
import hashlib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

import stages.store.s3_files
import stages.transfer.ranges
from stages.store.open import open_store
from tests.helpers.chain import Chain, finished_chain
from tests.helpers.stores.s3 import S3, moto, proxied, store_options


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """Tests that change the chain take a copy."""
    return finished_chain(tmp_path_factory)


@pytest.fixture(scope="module")
def model(chain: Chain) -> Path:
    return chain.latest("merge_shards") / "model"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with moto() as address:
        yield address


#: Cached, as each new session reads its description of S3 from disk, which takes longer than a test.
SESSIONS = functools.cache(boto3.Session)


@pytest.fixture
def s3(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    """Short waits for tests, parts of 100,000 bytes, and no AWS configuration of the user's."""
    monkeypatch.setattr(stages.transfer.ranges, "BACKOFF_S", 0.001)
    monkeypatch.setattr(stages.store.s3_files, "PART_BYTES", 100_000)
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1)
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr("boto3.Session", SESSIONS)
    with proxied(server) as proxy:
        yield proxy


class Bucket:
    """A new bucket, accessed without the proxy; keys as the store has them."""

    def __init__(self, s3: S3, **options: Any) -> None:
        self.name, self.client = f"b{uuid.uuid4().hex}", s3.client
        self.options = store_options(s3, self.name, **options)
        self.store = open_store(self.options)

    def put(self, key: str, data: bytes) -> str:
        etag: str = self.client.put_object(Bucket=self.name, Key=f"runs/store/{key}", Body=data)["ETag"]
        return etag

    def get(self, key: str) -> bytes:
        data: bytes = self.client.get_object(Bucket=self.name, Key=f"runs/store/{key}")["Body"].read()
        return data

    def head(self, key: str) -> dict[str, Any]:
        found: dict[str, Any] = self.client.head_object(Bucket=self.name, Key=f"runs/store/{key}")
        return found

    def keys(self) -> list[str]:
        found = self.client.list_objects_v2(Bucket=self.name).get("Contents", ())
        return [entry["Key"].removeprefix("runs/store/") for entry in found]

    def upload(self, data: bytes, path: Path, key: str = "objects/x") -> int:
        """Upload through the store, from a new file; returns the bytes reported."""
        path.write_bytes(data)
        moved: list[int] = []
        self.store.upload(key, path, len(data), hashlib.sha256(data).hexdigest(), moved.append)
        return sum(moved)

    def download(self, data: bytes, path: Path, key: str = "objects/x") -> int:
        """Ask the store for what should be `data`; returns the bytes reported."""
        moved: list[int] = []
        self.store.download(key, path, len(data), hashlib.sha256(data).hexdigest(), moved.append)
        return sum(moved)


@pytest.fixture
def bucket(s3: S3) -> Bucket:
    return Bucket(s3)
