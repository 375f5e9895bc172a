"""What a store holds, whether it is whole, and what can be removed from it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from common.errors import UserError
from stages.store.backend import Altered, Backend, Entry, Missing, Report
from stages.store.files import ignore
from stages.store.lease import StoredCheckpoint, Turn, turn_of_key
from stages.store.records import CHECKPOINTS, OBJECTS, STAGES, TURNS, Damaged, StageRecord, StoredFile, stage_of_key

#: Files to which no record refers are kept so long, in seconds: somebody may be about to write the record.
GRACE_S = 86400.0


@dataclass(frozen=True)
class StoredStage:
    """A complete stage. `written`: seconds since 1970, on the store's clock."""

    record: StageRecord
    written: float

    @property
    def name(self) -> str:
        return f"{self.record.label}-{self.record.fingerprint[:10]}"


@dataclass(frozen=True)
class StoredTraining:
    """Whose turn a stage is, and the checkpoints of a training that is not complete."""

    label: str
    fingerprint: str
    turn: Turn
    #: When the turn was last changed, in seconds since 1970 on the store's clock.
    written: float

    @property
    def name(self) -> str:
        return f"{self.label}-{self.fingerprint[:10]}"

    def files(self) -> dict[str, StoredFile]:
        """The files of its checkpoints, by key."""
        place = f"{CHECKPOINTS}/{self.label}-{self.fingerprint}"
        return {f"{place}/{one.token}/{file.sha256}": file for one in self.turn.checkpoints for file in _every(one)}


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
                raise Damaged("it is no record")
            found.stages.append(StoredStage(StageRecord.decode(backend.read(entry.key)[0], *stage), entry.written))
        except Damaged as error:
            found.damaged[entry.key] = str(error)
        except Missing:  # removed meanwhile
            return

    def read_turn(entry: Entry) -> None:
        made = turn_of_key(entry.key)
        try:
            if made is None:
                raise UserError("it is no record")
            found.trainings.append(StoredTraining(*made, Turn.read(backend, entry.key), entry.written))
        except UserError as error:
            found.damaged[entry.key] = str(error)

    with ThreadPoolExecutor(backend.connections) as threads:
        for work, prefix in ((read_stage, STAGES), (read_turn, TURNS)):
            list(threads.map(work, backend.list(f"{prefix}/")))
    found.stages.sort(key=lambda stage: stage.written, reverse=True)
    found.trainings.sort(key=lambda training: training.name)
    return found


def verify(backend: Backend, contents: Contents, *, read_all: bool, report: Report = ignore) -> dict[str, str]:
    """Keys of what is damaged or missing, and why. `read_all`: every file is fetched and hashed, else sizes are
    compared."""
    wrong = dict(contents.damaged)
    wanted = {file.key: file for stage in contents.stages for file in stage.record.files}
    for training in contents.trainings:
        wanted |= training.files()
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
    return wrong


def remove_damaged(backend: Backend, contents: Contents, wrong: dict[str, str]) -> list[str]:
    """Remove what is damaged, and the records of stages that are not whole without it, so that the next run pushes them
    again. Returns the stages' names."""
    broken = [stage for stage in contents.stages if any(file.key in wrong for file in stage.record.files)]
    backend.delete([stage.record.key for stage in broken])
    backend.delete(wrong)
    return [stage.name for stage in broken]


def superfluous(
    contents: Contents, *, older_than_s: float | None, most_bytes: int | None, newest: int | None, now: float
) -> list[StoredStage]:
    """The stages that are older than `older_than_s`, that are not among the `newest` of their label, or that must go,
    oldest first, until all the rest has at most `most_bytes`."""
    gone: list[StoredStage] = []
    seen: dict[str, int] = {}
    for stage in contents.stages:  # newest first
        seen[stage.record.label] = seen.get(stage.record.label, 0) + 1
        too_many = newest is not None and seen[stage.record.label] > newest
        if too_many or (older_than_s is not None and now - stage.written > older_than_s):
            gone.append(stage)
    if most_bytes is not None:
        kept = [stage for stage in contents.stages if stage not in gone]
        while kept and _bytes_of(kept) > most_bytes:
            gone.append(kept.pop())
    return gone


def remove(backend: Backend, contents: Contents, gone: Sequence[StoredStage], now: float) -> int:
    """Remove the stages, then the files to which nothing refers any more. Returns the bytes freed."""
    backend.delete([stage.record.key for stage in gone])
    unused = unreferenced(contents, gone, now)
    backend.delete([entry.key for entry in unused])
    backend.sweep(now - GRACE_S)
    return sum(entry.bytes for entry in unused)


def unreferenced(contents: Contents, gone: Sequence[StoredStage], now: float) -> list[Entry]:
    """Files of the stages `gone` that no other needs, and those older than `GRACE_S` to which nothing has ever
    referred, or does not any more."""
    removed = {stage.record.key for stage in gone}
    kept = [stage for stage in contents.stages if stage.record.key not in removed]
    needed = {file.key for stage in kept for file in stage.record.files}
    complete = {(stage.record.label, stage.record.fingerprint) for stage in kept}
    # A machine may have died after its training was complete, before its checkpoints were removed.
    trainings = [one for one in contents.trainings if one.turn.holder or (one.label, one.fingerprint) not in complete]
    needed |= {key for training in trainings for key in training.files()}
    named = {file.key for stage in gone for file in stage.record.files}
    return [
        entry
        for key, entry in contents.files.items()
        if key not in needed and (key in named or now - entry.written > GRACE_S)
    ]


def now_of(contents: Contents) -> float:
    """The time for ages, in seconds since 1970: this machine's, or the store's newest if that is later."""
    return max([time.time(), *(entry.written for entry in contents.files.values())])


def _bytes_of(stages: Sequence[StoredStage]) -> int:
    """Of their files, each counted once."""
    return sum({file.key: file.bytes for stage in stages for file in stage.record.files}.values())


def _every(checkpoint: StoredCheckpoint) -> Iterator[StoredFile]:
    yield from (*checkpoint.files, *checkpoint.records)
