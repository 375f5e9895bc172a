"""A spot notice with a slow store: the newest checkpoint is stored in time, or the last line says how far it got."""

from __future__ import annotations

import json
import re
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.chain import ENDLESS, Chain, wait_until, write_corpus
from tests.helpers.faulty.metadata import SPOT, Metadata, metadata_service
from tests.helpers.stores.s3 import KEYS, S3, Request, before, serving, stall

#: Seconds from the notice to the end of the instance.
NOTICE_S = 120
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": KEYS["aws_access_key_id"], "AWS_SECRET_ACCESS_KEY": KEYS["aws_secret_access_key"],
    "AWS_REGION": KEYS["region_name"],
}  # fmt: skip


class Machine:
    """A spot instance that trains for ever, with a store in S3."""

    def __init__(self, directory: Path, s3: S3, metadata: Metadata) -> None:
        self.s3, self.metadata, self.bucket = s3, metadata, f"b{uuid.uuid4().hex}"
        s3.client.create_bucket(Bucket=self.bucket)
        directory.mkdir()
        write_corpus(directory / "corpus.txt")
        self.chain = Chain(
            directory,
            f"\n[store]\nurl = s3://{self.bucket}/store\ns3_endpoint = {s3.url}\n[cluster]\nspot_watch = true\n",
        )
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        return self.chain.start(
            "Pretrain", "--phase", "1", "--Phase1-max-steps", ENDLESS, "--Phase1-ckpt-interval-steps", "20",
            **ENVIRONMENT, AWS_EC2_METADATA_SERVICE_ENDPOINT=self.metadata.url,
        )  # fmt: skip

    @property
    def log(self) -> str:
        return (self.chain.directory / "luigi.log").read_text(errors="replace")

    def stored(self) -> list[str]:
        """The checkpoints that another machine would resume from, the newest last."""
        for entry in self.s3.client.list_objects_v2(Bucket=self.bucket).get("Contents", ()):
            if "leases/pretrain" in entry["Key"]:
                body = self.s3.client.get_object(Bucket=self.bucket, Key=entry["Key"])["Body"].read()
                return [checkpoint["name"] for checkpoint in json.loads(body)["content"]["checkpoints"]]
        return []

    def newest(self) -> str:
        """The newest checkpoint on this machine."""
        (directory,) = self.chain.work.glob("pretrain-phase1-*/checkpoints")
        return max((path.name for path in directory.iterdir()), key=lambda name: int(name.removeprefix("ckpt_")))

    def notice(self) -> None:
        self.metadata.notices[SPOT] = json.dumps({"action": "terminate", "time": "2026-11-21T08:22:00Z"})


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with serving() as s3, metadata_service() as metadata:
        machine = Machine(tmp_path / "machine", s3, metadata)
        try:
            yield machine
        finally:
            machine.process.kill()
            machine.process.wait()


def brings_a_checkpoint(request: Request) -> bool:
    return request.operation == "put_object" and "/checkpoints/" in request.path


@pytest.mark.slow
def test_what_is_newest_is_in_a_slow_store_within_the_notice(machine: Machine) -> None:
    """Each file of a checkpoint takes three seconds, so that earlier checkpoints are still being uploaded."""
    machine.s3.fail(before(lambda: time.sleep(3)), brings_a_checkpoint, times=10_000)
    wait_until(lambda: len(machine.stored()) > 0)
    machine.notice()
    noticed = time.monotonic()
    assert machine.process.wait(timeout=NOTICE_S) == 75, machine.log
    assert time.monotonic() - noticed < NOTICE_S
    assert machine.stored()[-1] == machine.newest(), machine.log
    assert f"{machine.newest()} is in the store" in machine.log


@pytest.mark.slow
def test_a_store_that_is_too_slow_is_said_with_how_far_it_got(machine: Machine) -> None:
    """It takes small files only. Lines keep coming although nothing moves, until the instance is gone."""
    wait_until(lambda: len(machine.stored()) > 0)
    machine.s3.fail(stall, lambda request: brings_a_checkpoint(request) and len(request.body) > 20_000, times=10_000)
    machine.notice()
    said = r"pushing (ckpt_\d+) \(the store has (ckpt_\d+)\): ([\d,]+) of ([\d,]+) bytes are in the store"
    wait_until(lambda: len(re.findall(said, machine.log)) >= 2)
    name, has, moved, total = re.findall(said, machine.log)[-1]
    assert (name, has) == (machine.newest(), machine.stored()[-1])
    assert name != has
    assert 0 < int(moved.replace(",", "")) < int(total.replace(",", ""))
