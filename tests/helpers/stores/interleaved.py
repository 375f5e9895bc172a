"""Machines that share a store in memory: one call at a time, in the order that a test wants, with crashes.

An `Actor` is a process of a machine, in a thread of its own. It stops before every call of the store, and continues
when the test calls `step`. After each step `Shared.check` checks everything that the store holds.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeVar

from common.errors import UserError
from stages.directory.manifest import Identity
from stages.store.backend import Altered, Conflict, Entry, Missing, Report
from stages.store.lease import lease_key
from stages.store.records import stage_of_key

T = TypeVar("T")
IDENTITY = Identity("train", 1, 1)
LABEL, FINGERPRINT = "train-phase1", IDENTITY.fingerprint
#: Of a call: it is made; the process dies before or after it; it has no effect; it has its effect, but no answer comes.
Fate = Literal["made", "dies before", "dies after", "refused", "answer lost"]


class Dead(BaseException):
    """The process was killed."""


class Actor:
    """A process. `pending`: the call that it is about to make."""

    _living: ClassVar[set[Actor]] = set()

    def __init__(self, shared: Shared, work: Callable[[ActorsBackend], object]) -> None:
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._fate: Fate = "made"
        self._error: BaseException | None = None
        self.shared, self.pending, self.is_over = shared, "", False
        self._living.add(self)
        threading.Thread(target=self._run, args=(work,), daemon=True).start()
        self._stopped.acquire()

    def _run(self, work: Callable[[ActorsBackend], object]) -> None:
        try:
            work(ActorsBackend(self))
        except Dead:
            pass
        except BaseException as error:  # noqa: B036 - `step` raises it
            self._error = error
        self.is_over, self.pending = True, ""
        self._living.discard(self)
        self._stopped.release()

    def step(self, fate: Fate = "made") -> None:
        """Let the actor make its call, and go on until the next one."""
        assert not self.is_over
        self._fate = fate
        self._go.release()
        self._stopped.acquire()
        self.shared.check(self)
        if self._error is not None:
            raise self._error

    @classmethod
    def end_all(cls) -> None:
        """End all actors that still wait."""
        for actor in list(cls._living):
            actor._fate = "dies before"
            actor._go.release()
            actor._stopped.acquire()

    def call(self, what: str, effect: Callable[[], T]) -> T:
        """A call of the store, made in the actor's thread."""
        if not self._fate.startswith("dies"):
            self.pending = what
            self._stopped.release()
            self._go.acquire()
        if self._fate == "dies before":
            raise Dead
        if self._fate == "refused":
            raise UserError("the store does not answer")
        try:
            return effect()
        finally:
            if self._fate == "dies after":
                self._fate = "dies before"
                raise Dead
            if self._fate == "answer lost":
                raise UserError("the store does not answer")


class ActorsBackend:
    """The store, as an actor sees it. Versions are hashes of the content, as in folders and in S3."""

    url, connections = "memory:", 1

    def __init__(self, actor: Actor) -> None:
        self.actor, self._objects = actor, actor.shared.objects
        self._written = actor.shared.written

    def read(self, key: str) -> tuple[bytes, str]:
        return self.actor.call(f"read {key}", lambda: (self._get(key), _sha256(self._get(key))))

    def _get(self, key: str) -> bytes:
        if key not in self._objects:
            raise Missing(key)
        return self._objects[key]

    def write(self, key: str, data: bytes, *, replaces: str | None) -> str:
        def effect() -> str:
            before = _sha256(self._objects[key]) if key in self._objects else None
            if before != replaces and (before != _sha256(data) or not self.actor.shared.knows_own_bytes):
                raise Conflict(key)
            self._put(key, data)
            return _sha256(data)

        return self.actor.call(f"write {key}", effect)

    def _put(self, key: str, data: bytes) -> None:
        self._objects[key], self._written[key] = data, self.actor.shared.now

    def delete(self, keys: Collection[str]) -> None:
        for key in sorted(keys):
            self.actor.call(f"delete {key}", lambda key=key: self._objects.pop(key, None))  # type: ignore[misc]

    def list(self, prefix: str) -> Iterator[Entry]:
        everything = self.actor.call(f"list {prefix}", lambda: dict(self._objects))
        times = dict(self._written)
        return (
            Entry(key, len(data), times.get(key, 0.0)) for key, data in everything.items() if key.startswith(prefix)
        )

    def present(self, keys: Collection[str]) -> dict[str, int]:
        return self.actor.call(
            "present", lambda: {key: len(self._objects[key]) for key in keys if key in self._objects}
        )

    def upload(self, key: str, path: Path, size: int, sha256: str, report: Report) -> None:
        data = path.read_bytes()
        if (len(data), _sha256(data)) != (size, sha256):
            raise Altered(key)
        self.actor.call(f"upload {key}", lambda: self._put(key, data))
        report(size)

    def download(self, key: str, path: Path, size: int, sha256: str, report: Report) -> None:
        data = self.actor.call(f"download {key}", lambda: self._get(key))
        if (len(data), _sha256(data)) != (size, sha256):
            raise Altered(key)
        path.write_bytes(data)
        report(size)

    def sweep(self, before: float) -> int:
        return self.actor.call("sweep", lambda: 0)


class Shared:
    """What the machines share: the store, the time, and the rules."""

    lease_key, name = lease_key(LABEL, FINGERPRINT), f"{LABEL}-{FINGERPRINT}"

    def __init__(self, objects: Mapping[str, bytes] = MappingProxyType({})) -> None:
        self.objects = dict(objects)
        #: When objects were written; those that were there at the beginning at 0.
        self.written: dict[str, float] = {}
        #: Whether somebody removes objects that records list: then records may be incomplete for a while.
        self.is_pruned = False
        self._checked: dict[str, bytes] = {}
        self.now = 0.0
        #: Whether a write that finds its own bytes there counts as done, as in S3, or not, as in a folder.
        self.knows_own_bytes = False
        #: Tokens of the leases that were taken, in order.
        self.taken: list[int] = []
        #: The record of the lease.
        self.record = self._read_record()
        self._changed_at = 0.0
        self._whose: dict[int, Actor] = {}

    def _read_record(self) -> dict[str, Any]:
        if self.lease_key not in self.objects:
            return {"token": 0, "holder": None, "lease_s": 0.0, "checkpoints": []}
        content: dict[str, Any] = json.loads(self.objects[self.lease_key])["content"]
        return content

    def check(self, actor: Actor) -> None:
        """Check the rules after a call of the actor."""
        if self.objects == self._checked:
            return
        self._checked = dict(self.objects)
        before, self.record = self.record, self._read_record()
        if self.record != before:
            self._check_change(actor, before, self.record)
            self._changed_at = self.now
        for one in self.record["checkpoints"]:
            self._check_objects(f"checkpoints/{self.name}/{one['token']}/", one["files"] + one["records"])
        for key, data in self.objects.items():
            if stage_of_key(key) and not self.is_pruned:
                for file in json.loads(data)["content"]["files"]:
                    self._check_objects(f"objects/{file['sha256'][:2]}/", [file])

    def _check_change(self, actor: Actor, before: dict[str, Any], after: dict[str, Any]) -> None:
        if after["token"] == before["token"]:
            assert self._whose.get(after["token"]) is actor, f"lease {after['token']} is not the writer's"
            return
        assert after["token"] > before["token"], f"lease {after['token']} comes after {before['token']}"
        assert after["checkpoints"] == before["checkpoints"], "whoever takes the lease has the checkpoints"
        held = before["holder"] is not None and before["holder"]["id"] != after["holder"]["id"]
        assert not held or self.now - self._changed_at >= before["lease_s"], "the lease was taken too early"
        self._whose[after["token"]] = actor

    def _check_objects(self, place: str, files: list[dict[str, Any]]) -> None:
        for file in files:
            data = self.objects.get(place + file["sha256"])
            assert data is not None, f"{place}{file['sha256']} ({file['path']}) is listed and not there"
            assert _sha256(data) == file["sha256"], f"{place}{file['sha256']} has other bytes"


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
