"""Stores to measure: a folder, and S3 on moto's server, which is a process of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.processes import start
from common.process import free_port
from common.secrets import Secret
from stages.store.options import StoreOptions

KINDS = ("folder", "s3")
_KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
_BUCKET, _STARTS_S = "benchmark", 60.0


@dataclass(frozen=True)
class Place:
    """Where a store is."""

    url: str
    endpoint: str = ""
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def options(self) -> StoreOptions:
        return StoreOptions(url=Secret.address(self.url), s3_endpoint=Secret.address(self.endpoint))

    @property
    def section(self) -> str:
        """The section for luigi.cfg."""
        return f"[store]\nurl = {self.url}\ns3_endpoint = {self.endpoint}\n"


@contextlib.contextmanager
def place(kind: str, directory: Path, *, cores: Collection[int] = ()) -> Iterator[Place]:
    """An empty store for the block, with its credentials in the environment. `cores`: those of a server."""
    if kind == "folder":
        yield Place(str(directory / "store"))
        return
    before = {name: os.environ.get(name) for name in _KEYS}
    os.environ.update(_KEYS)
    with _moto(cores) as endpoint:
        client(endpoint).create_bucket(Bucket=_BUCKET)
        yield Place(f"s3://{_BUCKET}/store", endpoint, _KEYS)
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


def client(endpoint: str) -> Any:
    """A client of boto3, with its defaults."""
    import boto3

    return boto3.client("s3", endpoint_url=endpoint)


@contextlib.contextmanager
def _moto(cores: Collection[int]) -> Iterator[str]:
    """A running moto server; yields its address."""
    port = free_port()
    words = ("-m", "moto.server", "-H", "127.0.0.1", "-p", str(port))
    process = start(*words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        if cores:
            os.sched_setaffinity(process.pid, cores)
        address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + _STARTS_S
        while True:
            try:
                urllib.request.urlopen(address, timeout=5).close()
            except urllib.error.HTTPError:
                pass  # it answers
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    sys.exit("moto's server does not start; it comes with the extra [dev]")
                time.sleep(0.2)
                continue
            break
        yield address
    finally:
        process.kill()
        process.wait()
