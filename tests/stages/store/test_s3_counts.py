"""How many requests a store in S3 takes: none per shard where S3 reports many at once."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from moto.s3.models import s3_backends

import stages.store.s3_files
from common.errors import UserError
from stages.directory.manifest import Identity, Output, StageDirectory
from stages.store import maintenance
from stages.store.complete import find_stage, push_stage
from tests.helpers.stores.s3 import S3, error
from tests.stages.store.conftest import Bucket

PART = 100_000
SHARDS, NEW = 10_000, 300
IDENTITY = Identity("shard_dataset", 1, 1, {"seed": 1})
LABEL = "shard_dataset-phase1"


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in memory, where the system allows it."""
    place = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=place if place.is_dir() else None) as name:
        yield Path(name)


def put_quietly(bucket: Bucket, keys: list[str]) -> None:
    """Put objects of four bytes where the store finds them, without a request."""
    for key in keys:
        s3_backends["123456789012"]["aws"].put_object(bucket.name, f"runs/store/{key}", b"1234")


def counted(s3: S3) -> Counter[str]:
    """The requests since the last call, by operation."""
    found = Counter(request.operation for request in s3.requests)
    s3.requests.clear()
    return found


@pytest.mark.slow
def test_10000_shards_take_no_request_each_but_to_send_those_that_are_new(
    s3: S3, bucket: Bucket, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages.store.s3_files, "PART_BYTES", 16 << 20)
    with StageDirectory.begin(memory, lambda: IDENTITY) as work:
        outputs = []
        for number in range(SHARDS):
            (memory / f"{number:05}.hdf5").write_bytes(number.to_bytes(4))
            outputs.append(Output.of(memory, memory / f"{number:05}.hdf5"))
        work.finish(outputs, {})
    keys = [f"objects/{output.sha256[:2]}/{output.sha256}" for output in outputs]
    put_quietly(bucket, keys[NEW:])
    pages = SHARDS // 1000
    push_stage(bucket.store, memory, LABEL)
    found = counted(s3)
    # Besides the shards: stage.json, the manifest and the record, and three to probe the server.
    assert found.pop("put_object") == NEW + 3 + 3
    # Listed again when the record is written, and announcements of removals: what was there may be gone.
    assert found.pop("list_objects_v2") <= 2 * (pages + 1) + 1
    assert found.total() <= 5, found
    push_stage(bucket.store, memory, LABEL)
    found = counted(s3)
    assert found.pop("list_objects_v2") <= pages + 1 + 1
    assert found.total() < 5, found
    contents = maintenance.read(bucket.store)
    assert set(contents.files) > set(keys)
    assert not maintenance.verify(bucket.store, contents, read_all=False)
    assert find_stage(bucket.store, LABEL, IDENTITY.fingerprint) == contents.stages[0].record
    found = counted(s3)
    assert found.pop("list_objects_v2") <= pages + 4
    assert found.total() < 5, found


@pytest.mark.parametrize(("wanted", "at_most"), [(1000, 7), (110, 116)])
def test_many_objects_are_listed_and_a_few_of_many_asked_for(s3: S3, bucket: Bucket, wanted: int, at_most: int) -> None:
    keys = [f"objects/{os.urandom(32).hex()}" for _ in range(6000)]
    put_quietly(bucket, keys)
    asked = [*keys[: wanted // 2], *(f"objects/{os.urandom(32).hex()}" for _ in range(wanted // 2))]
    assert bucket.store.present(asked).keys() == set(keys[: wanted // 2])
    assert s3.count() <= at_most


def test_large_shards_take_one_listing_of_unfinished_uploads(s3: S3, bucket: Bucket, tmp_path: Path) -> None:
    for number in range(20):
        bucket.upload(os.urandom(PART + 1), tmp_path / "file", f"objects/{number}")
    assert counted(s3) == {
        "list_multipart_uploads": 1, "create_multipart_upload": 20, "upload_part": 40, "complete_multipart_upload": 20,
    }  # fmt: skip


def test_an_upload_that_is_begun_anew_after_an_error_knows_its_parts(s3: S3, tmp_path: Path) -> None:
    bucket, data = Bucket(s3, connections=1), os.urandom(4 * PART)
    s3.fail(error(500), lambda request: request.query.get("partNumber") == "4", times=7)
    with pytest.raises(UserError, match="7 times in a row"):
        bucket.upload(data, tmp_path / "file")
    counted(s3)
    bucket.upload(data, tmp_path / "file")
    assert counted(s3) == {"list_parts": 1, "upload_part": 1, "complete_multipart_upload": 1}
    assert bucket.get("objects/x") == data
