"""What every store backend promises: a folder, and S3 over HTTP (moto's server and SeaweedFS)."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import boto3
import pytest

from common.secrets import Secret
from stages.store.backend import Altered, Backend, Conflict, Missing
from stages.store.files import ignore
from stages.store.open import open_store
from stages.store.options import StoreOptions
from tests.helpers.stores.s3 import moto
from tests.helpers.stores.seaweedfs import seaweedfs


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with moto() as server:
        yield f"http://{server}"


@pytest.fixture(scope="module")
def other_endpoint() -> Iterator[str]:
    with seaweedfs() as address:
        yield address


@pytest.fixture(params=["folder", "endpoint", "other_endpoint"], ids=["folder", "moto", "seaweedfs"])
def backend(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Backend:
    if request.param == "folder":
        return open_store(StoreOptions(url=Secret.address(str(tmp_path / "store"))))
    address = request.getfixturevalue(request.param)
    for name, value in (("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "secret"), ("AWS_REGION", "us-east-1")):
        monkeypatch.setenv(name, value)
    bucket = f"b{hashlib.md5(str(tmp_path).encode()).hexdigest()[:20]}"
    boto3.client("s3", endpoint_url=address).create_bucket(Bucket=bucket)
    return open_store(StoreOptions(url=Secret.address(f"s3://{bucket}/a/b/"), s3_endpoint=Secret.address(address)))


def put(backend: Backend, key: str, data: bytes, path: Path) -> str:
    """Upload a file with this content; returns its sha256."""
    path.write_bytes(data)
    sha256 = hashlib.sha256(data).hexdigest()
    backend.upload(key, path, len(data), sha256, ignore)
    return sha256


def test_what_was_written_is_read_and_what_was_not_is_missing(backend: Backend) -> None:
    with pytest.raises(Missing):
        backend.read("leases/x.json")
    version = backend.write("leases/x.json", b"one", replaces=None)
    assert backend.read("leases/x.json") == (b"one", version)
    backend.delete(["leases/x.json", "leases/never.json"])
    with pytest.raises(Missing):
        backend.read("leases/x.json")


def test_a_write_succeeds_only_over_the_version_that_was_read(backend: Backend) -> None:
    with pytest.raises(Conflict):
        backend.write("x", b"zero", replaces="no such version")
    first = backend.write("x", b"one", replaces=None)
    with pytest.raises(Conflict):
        backend.write("x", b"two", replaces=None)
    second = backend.write("x", b"two", replaces=first)
    assert second != first
    with pytest.raises(Conflict):
        backend.write("x", b"three", replaces=first)
    assert backend.read("x") == (b"two", second)


def test_of_many_writers_at_once_one_succeeds(backend: Backend) -> None:
    """Eight writers count to 40 together by compare-and-swap: no count is lost."""
    backend.write("count", b"0", replaces=None)

    def count(writer: int) -> None:
        while True:
            data, version = backend.read("count")
            with contextlib.suppress(Conflict):
                backend.write("count", f"{int(data.split()[0]) + 1} by {writer}".encode(), replaces=version)
                return

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(count, range(40)))
    assert backend.read("count")[0].startswith(b"40 by")


@pytest.mark.parametrize("size", [0, 1, 1 << 16, (16 << 20) - 1, 16 << 20, (40 << 20) + 3])
def test_files_come_back_with_the_same_bytes(backend: Backend, tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    moved: list[int] = []
    sha256 = put(backend, "objects/aa/file", data, tmp_path / "up")
    backend.download("objects/aa/file", tmp_path / "down", size, sha256, moved.append)
    assert (tmp_path / "down").read_bytes() == data
    assert sum(moved) == size
    assert [(entry.key, entry.bytes) for entry in backend.list("objects/")] == [("objects/aa/file", size)]


def test_a_file_that_is_not_what_it_should_be_is_not_stored(backend: Backend, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"altered")
    for size, sha256 in ((7, hashlib.sha256(b"as it was").hexdigest()), (8, hashlib.sha256(b"altered").hexdigest())):
        with pytest.raises(Altered):
            backend.upload("objects/x", tmp_path / "file", size, sha256, ignore)
    assert backend.present(["objects/x"]) == {}
    assert list(backend.list("")) == []


@pytest.mark.parametrize("stored", [b"other bytes", b"short", b"something longer than it", b""])
def test_other_bytes_under_a_key_are_refused_and_leave_no_file(backend: Backend, tmp_path: Path, stored: bytes) -> None:
    put(backend, "objects/x", stored, tmp_path / "up")
    with pytest.raises(Altered):
        backend.download("objects/x", tmp_path / "down", 11, hashlib.sha256(b"right bytes").hexdigest(), ignore)
    assert not (tmp_path / "down").exists()
    with pytest.raises(Missing):
        backend.download("objects/y", tmp_path / "down", 11, hashlib.sha256(b"right bytes").hexdigest(), ignore)
    assert not (tmp_path / "down").exists()


@pytest.mark.parametrize("count", [3, 150])
def test_present_says_which_keys_there_are(backend: Backend, tmp_path: Path, count: int) -> None:
    keys = [f"objects/{number % 7:02}/{number:064x}" for number in range(count)]
    for key in keys:
        put(backend, key, key.encode(), tmp_path / "up")
    others = [f"objects/{number % 7:02}/{number:064x}" for number in range(count, 2 * count)]
    assert backend.present([*keys, *others]) == {key: len(key) for key in keys}
    assert backend.present([]) == {}
    backend.delete(keys)
    assert list(backend.list("objects/")) == []


def test_a_listing_has_the_keys_of_its_prefix_alone(backend: Backend) -> None:
    for key in ("stages/a/1.json", "stages/ab/2.json", "leases/1.json"):
        backend.write(key, b"x", replaces=None)
    assert {entry.key for entry in backend.list("stages/a")} == {"stages/a/1.json", "stages/ab/2.json"}
    assert {entry.key for entry in backend.list("stages/a/")} == {"stages/a/1.json"}
    assert {entry.key for entry in backend.list("nothing/")} == set()
    for entry in backend.list(""):
        assert abs(entry.written - time.time()) < 60
        assert entry.bytes == 1
