"""A machine that runs a training with a shared store as the pipeline does, one call of the store at a time."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError
from common.files import METRICS
from stages.directory.manifest import MANIFEST, Output, StartTime, finish
from stages.store.checkpoints import fetch_checkpoint, forget_checkpoints, newest_step
from stages.store.companion import Companion
from stages.store.complete import fetch_stage, find_stage, push_stage
from stages.store.lease import Lease, LeaseRecord, name_holder
from tests.helpers.stores.interleaved import FINGERPRINT, IDENTITY, LABEL, Actor, ActorsBackend, Shared
from trainer.checkpoint.directory import CHECKPOINTS, encode_manifest, whole_checkpoints

LEASE_S = 60.0


@dataclass
class Machine:
    """A machine with a directory of its own."""

    shared: Shared
    directory: Path
    #: Steps after which the training is complete; checkpoints that a process pushes before it hands the lease over.
    steps: int = 4
    pushes: int = 4
    #: Whether complete stages are fetched.
    pulls: bool = True
    #: How far its clock is off, in seconds.
    clock_s: float = 0.0

    def start(self, work: Callable[[ActorsBackend], object] | None = None) -> Actor:
        """Start a process, which tries three times to make the stage, or does `work`."""
        (self.directory / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        return Actor(self.shared, work or self._work)

    def _work(self, backend: ActorsBackend) -> None:
        for _ in range(3):
            with contextlib.suppress(UserError):
                return self._make(backend)

    def acquire(self, backend: ActorsBackend) -> Lease:
        """Take the lease. `fetch` gets the checkpoints that it lists."""
        lease = Lease.acquire(
            backend, self.shared.lease_key, name_holder(self.directory), LEASE_S,
            wait=lambda other: backend.actor.call("wait", lambda: None), clock=lambda: self.shared.now + self.clock_s,
        )  # fmt: skip
        assert not self.shared.taken or lease.token > self.shared.taken[-1]
        self.shared.taken.append(lease.token)
        return lease

    def fetch(self, backend: ActorsBackend, record: LeaseRecord) -> None:
        """Fetch the newest checkpoint of the lease, unless one here is as new. A later lease may have removed it."""
        listed = max((one.step for one in record.checkpoints), default=0)
        fetched = fetch_checkpoint(backend, record, self.shared.name, self.directory, newest_step(self.directory))
        if self.shared.record["token"] == record.token:
            assert self.step >= listed
            assert fetched is None or (self.directory / METRICS).read_bytes() == metrics_of(listed)
        if self.step:
            path = self.directory / CHECKPOINTS / f"ckpt_{self.step}"
            assert {file.name: file.read_bytes() for file in path.iterdir()} == checkpoint_of(self.step)

    @property
    def step(self) -> int:
        return next((step for step, _ in whole_checkpoints(self.directory / CHECKPOINTS)), 0)

    def _make(self, backend: ActorsBackend) -> None:
        lease = self.acquire(backend)
        stored = find_stage(backend, LABEL, FINGERPRINT) if self.pulls else None
        if stored is not None:
            fetch_stage(backend, stored, self.directory)
            return lease.release()
        companion = Companion(backend, lease, self.directory, LABEL, FINGERPRINT)
        if not (self.directory / MANIFEST).exists():
            self.fetch(backend, lease.record)
            for _ in range(self.pushes):
                self._train()
                lease.renew()
                companion.push_newest()
            if self.step < self.steps:
                return lease.release()
            write(self.directory, complete_stage())
        push_stage(backend, self.directory, LABEL)
        forget_checkpoints(backend, lease, self.shared.name, contextlib.nullcontext())
        lease.release()

    def _train(self) -> None:
        step = self.step + 1
        write(self.directory / CHECKPOINTS / f"ckpt_{step}", checkpoint_of(step))
        write(self.directory, {METRICS: metrics_of(step)})


def write(directory: Path, files: dict[str, bytes]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (directory / name).write_bytes(data)


@functools.cache
def complete_stage() -> dict[str, bytes]:
    """The files of the complete stage."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        write(path, {"weights": b"trained"})
        finish(path, IDENTITY, [Output.of(path, path / "weights")], {}, start=StartTime.now())
        return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


def checkpoint_of(step: int) -> dict[str, bytes]:
    """The files of a training's checkpoint, which are the same on every machine. Steps share some; sizes differ."""
    files = {"model": f"{step:0500}".encode(), "rarely changed": f"{step % 2:0400}".encode()}
    entries = [
        {"path": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()
    ]
    return {**files, "manifest.json": encode_manifest(step, entries)}


def metrics_of(step: int) -> bytes:
    return b"".join(b'{"step": %d}\n' % number for number in range(step))
