"""Many shards in an S3 store (moto's server): requests and seconds of a push, a second push and a listing.

Compared with boto3 with as many threads: `upload_file` of each, a HEAD of each, and its paginator. Requests are counted
where boto3 sends them. The server is one process and by far the slowest part, so the seconds mostly measure it.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.faults.stores import client, place
from benchmarks.results import Result, say
from stages.directory.manifest import Identity, Output, StageDirectory
from stages.store import maintenance
from stages.store.complete import push_stage
from stages.store.open import open_store
from stages.store.s3 import S3Backend

#: Requests other than those for shards: for records, and to probe the server.
BESIDE, PAGE = 12, 1000
LABEL, IDENTITY = "shard_dataset-phase1", Identity("shard_dataset", 1, 1, {"seed": 1})


def make(directory: Path, shards: int, size: int) -> None:
    """Make a complete stage of random files."""
    with StageDirectory.begin(directory, lambda: IDENTITY) as work:
        outputs = []
        for number in range(shards):
            path = directory / f"{number:05}.hdf5"
            path.write_bytes(os.urandom(size))
            outputs.append(Output.of(directory, path))
        work.finish(outputs, {})


def timed(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


class Theirs:
    """The same work with boto3."""

    def __init__(self, endpoint: str, directory: Path, threads: int) -> None:
        self._boto, self._threads = client(endpoint), threads
        self._bucket = self._boto.list_buckets()["Buckets"][0]["Name"]
        self._paths = sorted(directory.glob("*.hdf5"))

    def _each(self, work: Callable[[Path], object]) -> None:
        with ThreadPoolExecutor(self._threads) as threads:
            list(threads.map(work, self._paths))

    def upload(self) -> None:
        self._each(lambda path: self._boto.upload_file(str(path), self._bucket, f"theirs/{path.name}"))

    def ask(self) -> None:
        self._each(lambda path: self._boto.head_object(Bucket=self._bucket, Key=f"theirs/{path.name}"))

    def list(self) -> None:
        pages = self._boto.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix="theirs/")
        assert sum(len(page["Contents"]) for page in pages) == len(self._paths)


def main() -> None:
    p = argparse.ArgumentParser(prog="python -m benchmarks.faults.store_shards", description=__doc__)
    p.add_argument("--shards", type=int, default=10_000)
    p.add_argument("--kilobytes", type=int, default=16, help="of each")
    args = p.parse_args()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name, place("s3", Path(name)) as where:
        directory = Path(name) / "stage"
        make(directory, args.shards, 1000 * args.kilobytes)
        backend = open_store(where.options)
        assert isinstance(backend, S3Backend)
        requests: Counter[str] = Counter()
        count: Any = lambda model, **_: requests.update([model.name])  # noqa: E731
        backend._bucket.client.meta.events.register("before-call.s3", count)
        theirs = Theirs(where.endpoint, directory, backend.connections)
        pages = -(-args.shards // PAGE)
        for what, ours, beside, said, most in (
            ("push", lambda: push_stage(backend, directory, LABEL), theirs.upload, "upload_file", args.shards + pages),
            ("second push", lambda: push_stage(backend, directory, LABEL), theirs.ask, "head_object each", pages),
            ("listing", lambda: maintenance.read(backend), theirs.list, "a paginator", pages),
        ):
            requests.clear()
            mine = timed(ours)
            names = ", ".join(f"{count:,} {name}" for name, count in requests.most_common())
            other = f"boto3's {said} {timed(beside):.1f} s"
            whole = f"{args.shards:,} shards of {args.kilobytes} kB in S3: {what}"
            say(Result(whole, f"{names}; {mine:.1f} s", other, requests.total(), " requests", at_most=most + BESIDE))


if __name__ == "__main__":
    main()
