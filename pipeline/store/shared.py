"""What the store has is fetched, what is made is pushed alongside the run (`[store]`).

`making` surrounds the making of a stage whose lock is held: it takes the lease, fetches what the store has, and
starts a companion process that keeps the lease and pushes. That process outlives the stage until all is pushed; luigi
waits for it before it ends.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Literal

from common.console import log
from common.errors import LeaseLost, UserError
from common.threads import beside
from pipeline.launchers.base import Detached
from pipeline.settings.sections import Store
from pipeline.store.background import CompanionProcess, push_at_exit
from stages.directory import attempts
from stages.directory.manifest import MANIFEST
from stages.store.options import StoreOptions

if TYPE_CHECKING:
    from stages.store.backend import Backend
    from stages.store.lease import Holder, Lease
    from stages.store.records import StageRecord

#: What a stage counts as in [store] push and pull; None: it stays on its machine.
Kind = Literal["shards", "models"] | None
#: Seconds between checks on another machine that has the lease, and between log lines while waiting.
_LOOK_S, _SAY_EVERY_S = 2.0, 30.0
#: Seconds between log lines on the last push of an interrupted training.
_REPORT_EVERY_S = 5.0


@dataclass(frozen=True)
class SharedStage:
    """What the store needs to know about a stage."""

    label: str
    fingerprint: str
    directory: Path
    kind: Kind
    resumes: bool
    #: Names of the directories of the stages that it requires.
    siblings: tuple[str, ...]


class SharedStore:
    """The store that [store] names."""

    def __init__(self, settings: Store, options: StoreOptions) -> None:
        self._settings, self.options = settings, options
        #: Fingerprints of stages that could not be fetched.
        self._unusable: set[str] = set()

    @classmethod
    def of(cls, settings: Store) -> SharedStore | None:
        """None if there is no store."""
        options = settings.options
        return cls(settings, options) if options is not None else None

    @functools.cached_property
    def backend(self) -> Backend:
        """Imports boto3 for a store in S3, which takes 0.3 s."""
        from stages.store.open import open_store

        return open_store(self.options)

    def pushes(self, stage: SharedStage) -> bool:
        return stage.kind is not None and self._settings.push in ("all", stage.kind)

    def push_later(self, stage: SharedStage) -> None:
        """Push the complete stage at the end of this process, if no run has pushed it yet."""
        if self.pushes(stage):
            push_at_exit(self.options, stage.label, stage.directory)

    def has_pushed(self, stage: SharedStage) -> bool:
        """Whether the store has had the complete stage; it may have been removed there since."""
        from stages.store.complete import is_marked

        return is_marked(stage.directory, self.options.place)

    def pulls(self, stage: SharedStage) -> bool:
        return stage.kind is not None and self._settings.pull in ("all", stage.kind)

    def find(self, stage: SharedStage) -> StageRecord | None:
        """What the store has of the stage, if it may be fetched. Raises `UserError`."""
        from stages.store.complete import find_stage

        if stage.fingerprint in self._unusable:
            return None
        return find_stage(self.backend, stage.label, stage.fingerprint) if self.pulls(stage) else None

    def checkpoint_step(self, stage: SharedStage) -> int:
        """The global step of the newest checkpoint that the store has of the unfinished training, if it may be fetched;
        -1: of none. Raises `UserError`."""
        from stages.store.lease import LeaseRecord, lease_key

        if not (stage.resumes and self.pulls(stage)):
            return -1
        return LeaseRecord.read(self.backend, lease_key(stage.label, stage.fingerprint)).newest_step

    def fetch(self, stage: SharedStage) -> bool:
        """Fetch the complete stage, if the store has it whole; returns whether it did. Raises `UserError`."""
        from stages.directory.progress import transfer
        from stages.store.complete import fetch_stage
        from stages.store.files import NotUsable

        record = self.find(stage)
        if record is None:
            return False
        log(f"{stage.label}: fetched from {self.backend.url} ({record.total_bytes:,} bytes), pushed by {record.host}")
        try:
            with transfer(stage.directory, f"fetch {stage.label}", record.total_bytes) as bar:
                fetch_stage(self.backend, record, stage.directory, siblings=stage.siblings, report=bar.update)
        except NotUsable as error:
            log(f"{stage.label}: note: {error}; it is made here instead")
            self._unusable.add(stage.fingerprint)
            if self.pushes(stage):  # what is made here takes its place
                self.backend.delete(error.altered)
            return False
        return True

    @contextlib.contextmanager
    def making(self, stage: SharedStage, *, attached: bool) -> Iterator[bool]:
        """Surrounds the making of a stage whose lock is held. Yields whether it was fetched, with nothing left to make.
        `attached`: a job writes to its directory already, so nothing is fetched into it.

        Waits while another machine makes it. Raises `LeaseLost` if another takes over meanwhile; `UserError`.
        """
        if not attached and self.fetch(stage):
            yield True
            return
        if not self.pushes(stage):
            if stage.resumes and self.pulls(stage) and not attached:
                self._fetch_checkpoint(stage, None)
            yield False
            return
        lease = self._take_lease(stage)
        assert lease.record.holder is not None
        holder = lease.record.holder.id
        companion = CompanionProcess(self.options, stage.label, stage.directory, holder, lease.token)
        with _ended_by_loss(companion):
            yield from self._accompanied(stage, lease, companion, attached=attached)

    def _accompanied(
        self, stage: SharedStage, lease: Lease, companion: CompanionProcess, *, attached: bool
    ) -> Iterator[bool]:
        try:
            # Another machine may have completed it meanwhile.
            was_fetched = not attached and self.fetch(stage)
            if stage.resumes and not was_fetched and not attached:
                (self._fetch_checkpoint if self.pulls(stage) else self._begin_without)(stage, lease)
            yield was_fetched
        except BaseException as error:
            companion.stop()
            if companion.lost:
                raise LeaseLost(companion.lost) from None
            # A job that trains on is this machine's for as long as its lease lasts: luigi, started again, resumes it.
            self._hand_over(stage, lease, releases=not isinstance(error, Detached))
            raise
        if (stage.directory / MANIFEST).exists():
            companion.leave()
        else:
            companion.stop()
            self._hand_over(stage, lease)

    def _take_lease(self, stage: SharedStage) -> Lease:
        from stages.store.lease import Lease, lease_key, name_holder

        said = -_SAY_EVERY_S

        def wait(holder: Holder) -> None:
            nonlocal said
            if time.monotonic() - said >= _SAY_EVERY_S:
                said = time.monotonic()
                log(f"{stage.label}: {holder}, is making it; waiting (--Store-push none makes it here, too)")
            time.sleep(_LOOK_S)

        holder, key = name_holder(stage.directory), lease_key(stage.label, stage.fingerprint)
        return Lease.acquire(self.backend, key, holder, self.options.lease_s, wait=wait)

    def _fetch_checkpoint(self, stage: SharedStage, lease: Lease | None) -> None:
        from stages.store.checkpoints import fetch_checkpoint, forget_newer, newest_step
        from stages.store.lease import LeaseRecord, lease_key
        from stages.store.records import full_name

        began = time.time()
        key, name = lease_key(stage.label, stage.fingerprint), full_name(stage.label, stage.fingerprint)
        record = lease.record if lease is not None else LeaseRecord.read(self.backend, key)
        here = newest_step(stage.directory) if record.checkpoints else -1  # which reads gigabytes
        found = fetch_checkpoint(self.backend, record, name, stage.directory, here)
        if found is None and lease is None and record.checkpoints:  # whoever trains may have replaced all of them
            found = fetch_checkpoint(self.backend, LeaseRecord.read(self.backend, key), name, stage.directory, here)
        if lease is not None:
            forget_newer(self.backend, lease, name, here if found is None else found.step)
        if found is not None:
            attempts.record_wait(stage.directory, "downloading", began)
            log(f"{stage.label}: resumes from {found.name}, fetched from {self.backend.url}")

    def _begin_without(self, stage: SharedStage, lease: Lease) -> None:
        """The training here takes no checkpoint from the store."""
        from stages.store.checkpoints import forget_set_aside, newest_step
        from stages.store.records import full_name

        forget_set_aside(self.backend, lease, full_name(stage.label, stage.fingerprint), stage.directory)
        stored = lease.record.newest_step
        if stored > -1 and stored > newest_step(stage.directory):
            log(
                f"{stage.label}: {self.backend.url} has a checkpoint of step {stored}, which [store] pull = "
                f"{self._settings.pull} leaves there; those made here are pushed after that step"
            )

    def _hand_over(self, stage: SharedStage, lease: Lease, *, releases: bool = True) -> None:
        """Push the newest checkpoint; then, if `releases`, release the lease, so that another machine can take it. A
        store that does not answer is noted: the work directory has everything."""
        from stages.store.companion import Companion
        from stages.store.lease import Lease as LeaseOf
        from stages.store.lease import lease_key

        assert lease.record.holder is not None
        try:
            key = lease_key(stage.label, stage.fingerprint)
            again = LeaseOf.resume(self.backend, key, lease.record.holder.id, lease.token)
            last = Companion(self.backend, again, stage.directory, stage.label, stage.fingerprint)
            newest = last.unpushed() if stage.resumes else None
            if newest is not None:
                has = next((one.name for one in reversed(again.record.checkpoints)), "none")
                what = f"{stage.label}: pushing {newest.name} (the store has {has})"
                # Another machine may be waiting for the lease; if it gets it, the push says so.
                with last.renewing(lambda error: None), _said(what, newest) as report:
                    last.push_newest(report)
            if releases:
                last.release()
        except UserError as error:
            log(f"{stage.label}: note: {error}; the newest checkpoint may not be in the store")


@contextlib.contextmanager
def _ended_by_loss(companion: CompanionProcess) -> Iterator[None]:
    """In the block, SIGTERM raises `LeaseLost` once the lease is lost. A training saves and stops by a handler of its
    own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)

    def stop(signum: int, frame: FrameType | None) -> None:
        if companion.lost:
            raise LeaseLost(companion.lost)
        signal.signal(signal.SIGTERM, before)
        os.kill(os.getpid(), signum)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _said(what: str, checkpoint: Path) -> Iterator[Callable[[int], None]]:
    """Log from time to time how far the transfer of a checkpoint is, even while it does not advance: this machine may
    be gone before its end."""
    total = sum(path.stat().st_size for path in checkpoint.iterdir())
    moved = 0

    def add(some: int) -> None:
        nonlocal moved
        moved += some

    def say(over: threading.Event) -> None:
        while not over.wait(_REPORT_EVERY_S):
            log(f"{what}: {min(moved, total):,} of {total:,} bytes are in the store")

    with beside(say):
        yield add
