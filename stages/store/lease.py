"""Who is making a stage, and the checkpoints of a training run: one record, replaced in one step.

    leases/<label>-<fingerprint>.json    token, holder, beat, lease_s, checkpoints

A machine that wants to make a stage takes the lease by writing the record with the next token, and shows that it is
alive by incrementing `beat`. Every write replaces exactly the version that the writer has read (compare and swap), and
a writer gives up as soon as it reads a token other than its own: a machine that has lost its lease, even without
noticing, can no longer change anything. The token is a fencing token: files of a lease's checkpoints have it in their
keys, and nobody deletes files of a lease later than its own.

No clocks are compared. A waiting machine measures, on its own monotonic clock, how long the record has stayed the same;
after the holder's `lease_s` without a beat, it takes the lease. When a killed process is restarted on the same host, it
gets its lease back at once: the holder's name is kept in its stage directory, whose lock admits one process. Under
another host name it waits like anybody else: the directory may be a copy.
"""

from __future__ import annotations

import dataclasses
import os
import re
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import LeaseLost, UserError
from common.files import failpoint, read_json, utc_now, write_json
from common.lock import HOLDER
from stages.store.backend import Backend, Conflict, Missing
from stages.store.records import CHECKPOINTS, LEASES, Damaged, StoredFile, full_name, require_inside, seal, unseal


class DamagedLease(UserError):
    """The record of a lease is not what was written."""


@dataclass(frozen=True)
class Holder:
    """Who has the lease: a name drawn at random for the stage directory and, for people, where that is."""

    id: str
    host: str
    pid: int
    since: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"

    def is_same(self, other: Holder) -> bool:
        """Whether both are processes of one stage directory. A copy of it on another machine has its name, too."""
        return (self.id, self.host) == (other.id, other.host)


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint of an incomplete training run."""

    #: `ckpt_<step>`.
    name: str
    #: The token of the lease under which it was pushed.
    token: int
    #: In the checkpoint's own directory.
    files: tuple[StoredFile, ...]
    #: Beside `checkpoints/`: metrics and other records of the training.
    records: tuple[StoredFile, ...]

    @property
    def step(self) -> int:
        return int(self.name.removeprefix("ckpt_"))

    def key(self, training: str, file: StoredFile) -> str:
        """The key of one of its files. `training`: the `full_name` of the training run."""
        return f"{CHECKPOINTS}/{training}/{self.token}/{file.sha256}"

    def by_key(self, training: str) -> dict[str, StoredFile]:
        """All of its files."""
        return {self.key(training, file): file for file in (*self.files, *self.records)}


@dataclass(frozen=True)
class LeaseRecord:
    """The record. `version`: of the bytes that were read; None: there were none."""

    token: int = 0
    holder: Holder | None = None
    beat: int = 0
    #: Seconds without a beat after which the lease is free.
    lease_s: float = 0.0
    #: Oldest first.
    checkpoints: tuple[StoredCheckpoint, ...] = ()
    version: str | None = None

    @property
    def newest_step(self) -> int:
        """The global step of the newest checkpoint; -1: none."""
        return max((one.step for one in self.checkpoints), default=-1)

    def encode(self) -> bytes:
        return seal({name: value for name, value in dataclasses.asdict(self).items() if name != "version"})

    @classmethod
    def read(cls, backend: Backend, key: str) -> LeaseRecord:
        """The record under `key`; an empty one if there is none. Raises `DamagedLease`, `UserError`."""
        try:
            data, version = backend.read(key)
        except Missing:
            return cls()
        try:
            content = unseal(data)
            found = [_checkpoint(record) for record in content["checkpoints"]]
            holder = Holder(**content["holder"]) if content["holder"] else None
            return cls(
                int(content["token"]), holder, int(content["beat"]), float(content["lease_s"]), tuple(found), version
            )
        except (Damaged, KeyError, TypeError, ValueError) as error:
            raise DamagedLease(f"{backend.url}/{key} is damaged ({error}); remove it and run the same again") from None


def _checkpoint(record: dict[str, Any]) -> StoredCheckpoint:
    files, records = (tuple(map(StoredFile.of_record, record[name])) for name in ("files", "records"))
    require_inside((*files, *records))
    found = StoredCheckpoint(str(record["name"]), int(record["token"]), files, records)
    if found.step < 0:
        raise Damaged(f"it lists {found.name}")
    return found


def lease_key(label: str, fingerprint: str) -> str:
    return f"{LEASES}/{full_name(label, fingerprint)}.json"


def lease_of_key(key: str) -> tuple[str, str] | None:
    """Label and fingerprint of a `lease_key`; None for other keys."""
    found = re.fullmatch(rf"{LEASES}/([a-z0-9_-]+)-([0-9a-f]{{64}})\.json", key)
    return (found[1], found[2]) if found else None


def name_holder(directory: Path) -> Holder:
    """The holder for the stage directory, whose lock this process has. Raises `DiskError`."""
    record = read_json(directory / HOLDER)
    if record is None or not isinstance(record.get("id"), str):
        record = {"id": uuid.uuid4().hex}
        write_json(directory / HOLDER, record)
    return Holder(record["id"], socket.gethostname(), os.getpid(), utc_now())


class Lease:
    """A lease that this machine has taken. One thread or process at a time may use it."""

    def __init__(self, backend: Backend, key: str, record: LeaseRecord) -> None:
        self._backend, self._key, self.record = backend, key, record

    @property
    def token(self) -> int:
        return self.record.token

    @classmethod
    def acquire(
        cls, backend: Backend, key: str, holder: Holder, lease_s: float, *, wait: Callable[[Holder], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> Lease:  # fmt: skip
        """Take the lease as soon as nobody has it. While another machine has it, `wait` is called repeatedly; it
        sleeps, and may raise. Raises `UserError`."""
        seen: tuple[str | None, float] | None = None
        while True:
            record = LeaseRecord.read(backend, key)
            other = None if record.holder is None or record.holder.is_same(holder) else record.holder
            if other is not None:
                if seen is None or seen[0] != record.version:
                    seen = record.version, clock()
                if clock() - seen[1] <= record.lease_s:
                    wait(other)
                    continue
            mine = dataclasses.replace(record, token=record.token + 1, holder=holder, beat=0, lease_s=lease_s)
            try:
                version = backend.write(key, mine.encode(), replaces=record.version)
            except Conflict:
                continue
            failpoint("lease-taken")
            return cls(backend, key, dataclasses.replace(mine, version=version))

    @classmethod
    def resume(cls, backend: Backend, key: str, holder_id: str, token: int) -> Lease:
        """The lease that another process of this stage directory has taken. Raises `LeaseLost`."""
        lease = cls(backend, key, LeaseRecord(token=token, holder=Holder(holder_id, "", 0, "")))
        lease._read()
        return lease

    def renew(self) -> None:
        """Show that this machine is at work. Raises `LeaseLost`, `UserError`."""
        self._change(lambda record: dataclasses.replace(record, beat=record.beat + 1))

    def keep(self, checkpoints: tuple[StoredCheckpoint, ...]) -> None:
        """List these checkpoints instead of the previous ones. Raises `LeaseLost`, `UserError`."""
        self._change(lambda record: dataclasses.replace(record, beat=record.beat + 1, checkpoints=checkpoints))

    def release(self) -> None:
        """Let another machine take the lease at once. Raises `LeaseLost`, `UserError`."""
        self._change(lambda record: dataclasses.replace(record, holder=None))

    def _change(self, change: Callable[[LeaseRecord], LeaseRecord]) -> None:
        while True:
            record = change(self.record)
            try:
                version = self._backend.write(self._key, record.encode(), replaces=self.record.version)
            except Conflict:
                self._read()
                continue
            self.record = dataclasses.replace(record, version=version)
            return

    def _read(self) -> None:
        record, mine = LeaseRecord.read(self._backend, self._key), self.record.holder
        assert mine is not None
        if record.token != self.token or record.holder is None or record.holder.id != mine.id:
            who = f"{record.holder} has taken it" if record.holder else "it was given to another"
            raise LeaseLost(f"{self._backend.url}/{self._key}: this machine has lost its lease: {who}")
        self.record = record
