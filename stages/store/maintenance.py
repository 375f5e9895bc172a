"""What a store holds, whether it is whole, and what can be removed from it."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import uuid
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from common.console import log
from common.errors import UserError
from stages.directory.manifest import directory_name
from stages.store.backend import Altered, Backend, Conflict, Entry, Missing, Report, one_at_a_time
from stages.store.files import ignore
from stages.store.lease import DamagedLease, LeaseRecord, StoredCheckpoint, lease_key, lease_of_key
from stages.store.records import (
    CHECKPOINTS,
    LEASES,
    OBJECTS,
    PREFIXES,
    PROBES,
    STAGES,
    Damaged,
    StageRecord,
    StoredFile,
    full_name,
    stage_of_key,
)
from stages.store.removals import announced, remove_files

#: How long files to which no record refers are kept, in seconds: somebody may be about to write the record.
GRACE_S = 86400.0


@dataclass(frozen=True)
class StoredStage:
    """A complete stage. `written`: seconds since 1970, on the store's clock."""

    record: StageRecord
    written: float

    @property
    def name(self) -> str:
        return directory_name(self.record.label, self.record.fingerprint)

    def files(self) -> dict[str, StoredFile]:
        """Its files, by key."""
        return {file.key: file for file in self.record.files}


@dataclass(frozen=True)
class StoredTraining:
    """Who holds the lease of a stage, and the checkpoints of an incomplete training run."""

    label: str
    fingerprint: str
    lease: LeaseRecord
    #: When that record was last changed, in seconds since 1970 on the store's clock.
    written: float

    @property
    def name(self) -> str:
        return directory_name(self.label, self.fingerprint)

    def files(self) -> dict[str, StoredFile]:
        """The files of its checkpoints, by key."""
        return {key: file for one in self.lease.checkpoints for key, file in self.files_of(one).items()}

    def files_of(self, checkpoint: StoredCheckpoint) -> dict[str, StoredFile]:
        """The files of one of its checkpoints, by key."""
        return checkpoint.by_key(full_name(self.label, self.fingerprint))

    def is_held(self, now: float) -> bool:
        """Whether somebody works on it: has renewed the lease within its time. `now`: on the store's clock."""
        return self.lease.holder is not None and now - self.written <= self.lease.lease_s

    def keep(self, backend: Backend, checkpoints: tuple[StoredCheckpoint, ...]) -> None:
        """List only these checkpoints, unless somebody has changed the record since it was read."""
        record = dataclasses.replace(self.lease, beat=self.lease.beat + 1, checkpoints=checkpoints)
        with contextlib.suppress(Conflict):
            backend.write(lease_key(self.label, self.fingerprint), record.encode(), replaces=self.lease.version)


@dataclass
class Contents:
    """Everything in a store. Damaged records: key → reason."""

    stages: list[StoredStage] = field(default_factory=list)
    trainings: list[StoredTraining] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)
    #: All files, by key.
    files: dict[str, Entry] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        return sum(entry.bytes for entry in self.files.values())

    @property
    def referenced_bytes(self) -> int:
        """Bytes of the files that are there and that a record names."""
        named = _files_of([*self.stages, *self.trainings])
        return sum(entry.bytes for key, entry in self.files.items() if key in named)


def read(backend: Backend) -> Contents:
    """Read all records and list all files. Raises `UserError`."""
    found = read_records(backend)
    for prefix in (OBJECTS, CHECKPOINTS):
        found.files |= {entry.key: entry for entry in backend.list(f"{prefix}/")}
    return found


def read_records(backend: Backend) -> Contents:
    """Read all records, newest stages first; files are not listed. Raises `UserError`."""
    found = Contents()

    def read_stage(entry: Entry) -> None:
        stage = stage_of_key(entry.key)
        try:
            if stage is None:
                raise Damaged("it is not a record")
            found.stages.append(StoredStage(StageRecord.decode(backend.read(entry.key)[0], *stage), entry.written))
        except Damaged as error:
            found.damaged[entry.key] = str(error)
        except Missing:  # removed meanwhile
            return

    def read_lease(entry: Entry) -> None:
        made = lease_of_key(entry.key)
        try:
            if made is None:
                raise DamagedLease("it is not a record")
            record = LeaseRecord.read(backend, entry.key)
            if record.version is not None:  # else removed meanwhile
                found.trainings.append(StoredTraining(*made, record, entry.written))
        except DamagedLease as error:
            found.damaged[entry.key] = str(error)

    with ThreadPoolExecutor(backend.connections) as threads:
        for work, prefix in ((read_stage, STAGES), (read_lease, LEASES)):
            list(threads.map(work, backend.list(f"{prefix}/")))
    found.stages.sort(key=lambda stage: stage.written, reverse=True)
    found.trainings.sort(key=lambda training: training.name)
    return found


def verify(backend: Backend, contents: Contents, *, read_all: bool, report: Report = ignore) -> dict[str, str]:
    """Keys of what is damaged or missing, and why. `read_all`: every file is fetched and hashed; otherwise sizes are
    compared."""
    report = one_at_a_time(report)
    wrong = dict(contents.damaged)
    wanted = _files_of([*contents.stages, *contents.trainings])
    with tempfile.TemporaryDirectory(prefix="store-verify-") as name:
        for key, file in sorted(wanted.items()):
            entry = contents.files.get(key)
            if entry is None:
                wrong[key] = "missing"
            elif entry.bytes != file.bytes:
                wrong[key] = f"{entry.bytes} bytes instead of {file.bytes}"
            elif read_all:
                copy = Path(name) / "file"
                try:
                    backend.download(key, copy, file.bytes, file.sha256, report)
                    copy.unlink()
                except Altered:
                    wrong[key] = "its sha256 is not its name's"
                except Missing:
                    wrong[key] = "missing"
    if wrong.keys() - contents.damaged.keys():  # not what was removed, with its record, since `contents` were read
        left = read_records(backend)
        named = _files_of([*left.stages, *left.trainings])
        wrong = {key: why for key, why in wrong.items() if key in named or key in contents.damaged}
    return wrong


def remove_damaged(backend: Backend, contents: Contents, wrong: dict[str, str]) -> list[str]:
    """Remove what is damaged, and the records of stages and checkpoints that are incomplete without it. Returns the
    stages' names."""
    broken = [stage for stage in contents.stages if wrong.keys() & stage.files().keys()]
    with announced(backend) as go_on:
        backend.delete([stage.record.key for stage in broken])
        for training in contents.trainings:
            listed = training.lease.checkpoints
            whole = tuple(one for one in listed if not wrong.keys() & training.files_of(one).keys())
            if whole != listed:
                training.keep(backend, whole)
        remove_files(backend, wrong, {stage.record.key for stage in contents.stages}, go_on)
    return [stage.name for stage in broken]


def superfluous(
    contents: Contents, *, older_than_s: float | None, most_bytes: int | None, newest: int | None, now: float
) -> list[StoredStage | StoredTraining]:
    """The stages that are older than `older_than_s`, that are not among the `newest` of their label, or that must go,
    oldest first, until the rest have at most `most_bytes` in all; and incomplete training runs with checkpoints on
    which nobody has worked for `older_than_s`."""
    gone: list[StoredStage | StoredTraining] = []
    seen: dict[str, int] = {}
    for stage in contents.stages:  # newest first
        seen[stage.record.label] = seen.get(stage.record.label, 0) + 1
        too_many = newest is not None and seen[stage.record.label] > newest
        if too_many or (older_than_s is not None and now - stage.written > older_than_s):
            gone.append(stage)
    if most_bytes is not None:
        kept = [stage for stage in contents.stages if stage not in gone]
        while kept and sum(file.bytes for file in _files_of(kept).values()) > most_bytes:
            gone.append(kept.pop())
    if older_than_s is not None:
        # A lease is renewed while somebody is at work.
        gone += [one for one in contents.trainings if one.lease.checkpoints and now - one.written > older_than_s]
    return gone


def remove(backend: Backend, contents: Contents, gone: Sequence[StoredStage | StoredTraining], now: float) -> int:
    """Remove the stages and the checkpoints of training runs, then the files to which nothing refers any more. Returns
    the bytes freed. Raises `UserError` while any records are damaged, as their files are unknown."""
    if count := len(contents.damaged):
        raise UserError(
            f"{backend.url} has {count} damaged record{'s' if count > 1 else ''}, whose files would be removed as "
            f"unreferenced; first: python -m pipeline store verify --remove"
        )
    with announced(backend) as go_on:
        backend.delete([one.record.key for one in gone if isinstance(one, StoredStage)])
        for one in gone:
            if isinstance(one, StoredTraining):
                one.keep(backend, ())
        left = read_records(backend)  # what was pushed since `contents` were read needs its files
        left.files = contents.files
        unused = unreferenced(left, gone, now)
        remove_files(backend, [entry.key for entry in unused], {stage.record.key for stage in left.stages}, go_on)
    backend.sweep(now - GRACE_S)
    return sum(entry.bytes for entry in unused)


def unreferenced(left: Contents, gone: Sequence[StoredStage | StoredTraining], now: float) -> list[Entry]:
    """Files to which no record of `left` refers: those that `gone` needed, and those older than `GRACE_S`."""
    complete = {(stage.record.label, stage.record.fingerprint) for stage in left.stages}
    # A machine may have died after its training was complete, before its checkpoints were removed.
    trainings = [one for one in left.trainings if one.is_held(now) or (one.label, one.fingerprint) not in complete]
    needed, named = _files_of([*left.stages, *trainings]), _files_of(gone)
    return [
        entry
        for key, entry in left.files.items()
        if key not in needed and (key in named or now - entry.written > GRACE_S)
    ]


def without(contents: Contents, gone: Sequence[StoredStage | StoredTraining]) -> Contents:
    """What is left once `gone` is removed."""
    stages = [one for one in contents.stages if one not in gone]
    trainings = [one for one in contents.trainings if one not in gone]
    return dataclasses.replace(contents, stages=stages, trainings=trainings)


def now_of(backend: Backend) -> float:
    """The time to count ages from, in seconds since 1970 on the store's clock: that of an object written now, or, for
    those who may only read, of what was written last. Raises `UserError`."""
    key = f"{PROBES}/{uuid.uuid4().hex}"
    try:
        backend.write(key, b"What time is it?", replaces=None)
    except UserError as error:
        log(f"note: {error}; ages are counted from what was written last")
        entries = (entry for prefix in PREFIXES for entry in backend.list(f"{prefix}/"))
        return max((entry.written for entry in entries), default=0.0)
    try:
        return next(entry.written for entry in backend.list(key) if entry.key == key)
    finally:
        backend.delete([key])


def _files_of(stored: Collection[StoredStage | StoredTraining]) -> dict[str, StoredFile]:
    """Their files, by key."""
    return {key: file for one in stored for key, file in one.files().items()}
