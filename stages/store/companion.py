"""Runs while a stage is being made: keeps the lease, pushes new checkpoints and, at the end, the complete stage."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from common.console import log
from common.errors import LeaseLost, UserError
from common.process import available_cores
from common.threads import beside
from stages.directory.manifest import MANIFEST
from stages.store.backend import Backend, Report
from stages.store.checkpoints import forget_checkpoints, push_checkpoint
from stages.store.complete import push_stage
from stages.store.files import NotUsable, ignore
from stages.store.lease import Lease
from stages.store.records import full_name
from trainer.checkpoint.directory import CHECKPOINTS, whole_checkpoints

#: Seconds between two checks of the stage directory, and before a failed push is retried.
_LOOK_S, _AGAIN_S = 1.0, 15.0
#: Largest share of this machine's processor time that pushing checkpoints takes. With the kernel's writes, training is
#: slowed by two to three times as much: about 1 %.
_SHARE = 0.004
#: A lease is renewed this many times before it would expire.
_RENEWALS = 4
#: Attempts at pushing the complete stage.
_TRIES = 3


class Companion:
    """`label`, `fingerprint`: of the stage in `directory`."""

    def __init__(self, backend: Backend, lease: Lease, directory: Path, label: str, fingerprint: str) -> None:
        self._backend, self._lease, self._directory, self._label = backend, lease, directory, label
        self._name = full_name(label, fingerprint)
        #: Held by whichever thread uses the lease.
        self._alone = threading.Lock()
        self._refused: set[Path] = set()
        self._began = (time.monotonic(), time.process_time())

    def run(self) -> None:
        """Run until the stage is complete and pushed. Raises `UserError`; ends the process if the lease is lost."""
        with self.renewing(_end):
            self._push_until_complete()

    def _push_until_complete(self) -> None:
        while not (self._directory / MANIFEST).exists():
            try:
                pushed = self._is_due() and self.push_newest()
            except LeaseLost as error:
                _end(error)
            except UserError as error:
                log(f"note: {error}; trying again in {_AGAIN_S:g} s")
                time.sleep(_AGAIN_S)
                continue
            if not pushed:
                time.sleep(_LOOK_S)
        self._push_stage()

    def _is_due(self) -> bool:
        """Whether this process has used less than its share. Checkpoints that are made faster are skipped."""
        elapsed, used = time.monotonic() - self._began[0], time.process_time() - self._began[1]
        return used < _SHARE * elapsed * available_cores()

    def push_newest(self, report: Report = ignore) -> bool:
        """Push the newest checkpoint if the store has none as new; returns whether it did. Raises `LeaseLost`,
        `UserError`."""
        path = self.unpushed()
        if path is None:
            return False
        began = time.monotonic()
        try:
            push_checkpoint(
                self._backend, self._lease, self._name, self._directory, path, alone=self._alone, report=report
            )
        except NotUsable as error:
            self._refused.add(path)
            log(f"note: {error}; it is not pushed")
            return False
        log(f"{path.name} is in the store ({time.monotonic() - began:.1f} s)")
        return True

    def unpushed(self) -> Path | None:
        """The newest checkpoint, if the store has none as new."""
        stored = self._lease.record.newest_step
        found = next(iter(whole_checkpoints(self._directory / CHECKPOINTS)), None)
        return None if found is None or found[0] <= stored or found[1] in self._refused else found[1]

    def _push_stage(self) -> None:
        for left in reversed(range(_TRIES)):
            try:
                record = push_stage(self._backend, self._directory, self._label)
                break
            except UserError as error:
                if not left:
                    raise
                log(f"note: {error}; trying again in {_AGAIN_S:g} s")
                time.sleep(_AGAIN_S)
        log(f"{self._label} is in the store: {len(record.files):,} files, {record.total_bytes:,} bytes")
        forget_checkpoints(self._backend, self._lease, self._name, self._alone)
        self.release()

    def release(self) -> None:
        """Let another machine take the lease. Raises `LeaseLost`, `UserError`."""
        with self._alone:
            self._lease.release()

    def renewing(self, lost: Callable[[LeaseLost], object]) -> contextlib.AbstractContextManager[None]:
        """Renew the lease at once, then repeatedly until the end of the block. `lost` is called, in another thread,
        when another machine has taken it; whoever uses the lease after that gets `LeaseLost`."""
        return beside(functools.partial(self._renew, lost))

    def _renew(self, lost: Callable[[LeaseLost], object], over: threading.Event) -> None:
        is_noted = False
        while not over.is_set():
            try:
                with self._alone:
                    if self._lease.record.holder is None:
                        return
                    self._lease.renew()
                is_noted = False
            except LeaseLost as error:
                lost(error)
                return
            except UserError as error:  # while the store does not answer, nobody else can take the lease
                if not is_noted:
                    log(f"note: {error}")
                is_noted = True
            over.wait(self._lease.record.lease_s / _RENEWALS)


def _end(error: LeaseLost) -> None:
    """End this process: whatever it is pushing belongs to a lease that is over."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    os._exit(error.exit_status)
