"""The stage directories of a work directory and the processes that work in them."""

from __future__ import annotations

import contextlib
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.files import read_json
from pipeline.launchers import find_job
from pipeline.launchers.jobs import Job, Unreachable
from pipeline.status.latest import LATEST
from stages.directory.lock import JOB, LOCK, is_held
from stages.directory.manifest import IDENTITY, MANIFEST, stage_label, why_incomplete
from stages.directory.records import read_identity, read_manifest
from trainer.checkpoint.directory import CHECKPOINTS, abandoned, whole_checkpoints
from trainer.state import STATE

_NAME = re.compile(r"(?P<label>[a-z][a-z0-9_]*(?:-phase[0-9]+)?)-(?P<short>[0-9a-f]{10})")
#: Larger than any number of a record, and small enough for arithmetic.
_NO_NUMBER = 1e300


@dataclass(frozen=True)
class StageDir:
    """A stage directory, whatever its settings."""

    path: Path
    #: `<stage>[-phase<N>]`, as in its name.
    label: str
    #: Its manifest.json, or stage.json where there is none.
    record: dict[str, Any]
    #: Modification time of that file, in seconds since 1970.
    written: float

    @property
    def fingerprint(self) -> str:
        return str(self.record["fingerprint"])

    @property
    def is_complete(self) -> bool:
        return why_incomplete(self.path, self.fingerprint) is None


class StageDirs:
    """All stage directories of a work directory: those whose name and record agree; and those `elsewhere`."""

    def __init__(self, work_dir: Path, elsewhere: Iterable[StageDir] = ()) -> None:
        self.work_dir = work_dir
        self.by_label: dict[str, list[StageDir]] = defaultdict(list)
        #: Those that cannot be read, or the work directory itself: another user's.
        self.unreadable: list[Path] = []
        found = (*self._found(), *elsewhere)
        self.all = sorted(found, key=lambda stage_dir: stage_dir.written, reverse=True)
        self._by_fingerprint: dict[str, StageDir] = {}
        for stage_dir in self.all:
            self.by_label[stage_dir.label].append(stage_dir)
            self._by_fingerprint.setdefault(stage_dir.fingerprint, stage_dir)

    def _found(self) -> Iterator[StageDir]:
        try:
            inside = list(self.work_dir.iterdir()) if self.work_dir.is_dir() else []
        except PermissionError:
            self.unreadable.append(self.work_dir)
            return
        for path in inside:
            name = _NAME.fullmatch(path.name)
            if name is None or path.is_symlink() or not path.is_dir():
                continue
            try:
                found = _stage_dir(path, name["label"], name["short"])
            except PermissionError:
                self.unreadable.append(path)
                continue
            if found is not None:
                yield found

    def others(self, label: str, fingerprint: str) -> list[StageDir]:
        """Directories of a stage with other settings, newest first."""
        return [stage_dir for stage_dir in self.by_label[label] if stage_dir.fingerprint != fingerprint]

    def made_with(self, stage_dir: StageDir) -> list[StageDir]:
        """The stages that `stage_dir` was made from, as far as they are there, and itself, in running order."""
        found, seen = list[StageDir](), set[str]()

        def add(one: StageDir) -> None:
            seen.add(one.fingerprint)
            for fingerprint in one.record.get("upstream", {}).values():
                up = self.of_fingerprint(str(fingerprint))
                if up is not None and up.fingerprint not in seen:  # damaged records may name each other
                    add(up)
            found.append(one)

        add(stage_dir)
        return found

    def chains(self, is_training: Callable[[StageDir], bool]) -> list[list[StageDir]]:
        """Each training after the stages that it was made from, newest first; one that another training was made from
        is only part of the other's chain."""
        every = [self.made_with(one) for one in self.all if is_training(one)]
        starts = {up.fingerprint for chain in every for up in chain[:-1] if is_training(up)}
        return [chain for chain in every if chain[-1].fingerprint not in starts]

    def evaluated_chain(self) -> list[StageDir]:
        """The newest complete evaluation and the stages that it was made from, in running order."""
        newest = (self.work_dir / LATEST / "evaluate").resolve()
        return [one for end in self.by_label["evaluate"] if end.path.resolve() == newest for one in self.made_with(end)]

    def of_fingerprint(self, fingerprint: str) -> StageDir | None:
        return self._by_fingerprint.get(fingerprint)

    def linked(self) -> set[Path]:
        """The targets of the links in `latest/`."""
        latest = self.work_dir / LATEST
        links = latest.iterdir() if latest.is_dir() else iter(())
        return {link.resolve() for link in links if link.is_symlink()}


def _stage_dir(path: Path, label: str, short: str) -> StageDir | None:
    """The stage in `path`, if its record agrees with the directory's name."""
    for file, read in ((path / MANIFEST, read_manifest), (path / IDENTITY, read_identity)):
        record = read(path)
        if record is not None:
            of_record = stage_label(str(record.get("stage")), record.get("phase"))
            agrees = of_record == label and str(record.get("fingerprint"))[:10] == short
            return StageDir(path, label, record, file.stat().st_mtime) if agrees else None
    return None


@dataclass(frozen=True)
class Holder:
    """What works in a stage directory: the process in the lock file, a scheduler's job, or a process that waits for
    one."""

    host: str
    pid: int | None
    started: str | None
    #: The job and its state: `slurm job 12: RUNNING (on n[1-2])`.
    job: str | None = None

    def __str__(self) -> str:
        return self.job or f"process {self.pid or '?'} on {self.host}"


def holder(directory: Path) -> Holder | None:
    """What works in `directory`, or None. Changes nothing; asks the scheduler for a job's state."""
    record = (read_json(directory / LOCK) or {}) if is_held(directory) else None
    try:
        job = find_job(directory)
    except UserError as error:  # its record is damaged, so it may be running
        return Holder("?", None, None, str(error))
    state = None if job is None else _state(job)
    if record is None and state is None:
        return None
    record = record or {}
    started = record.get("started") if job is None or state is None else job.submitted
    return Holder(str(record.get("host", "?")), record.get("pid"), started, state)


def _state(job: Job) -> str | None:
    """A description of a job; None if it is over."""
    try:
        state = job.state()
    except (Unreachable, UserError) as error:
        return f"{job}: unknown ({error}); if it is over, remove its {JOB}"
    return f"{job}: {state}" if state is not None and state.is_alive else None


def last_checkpoint_step(directory: Path) -> int | None:
    """The optimizer step, within its phase, of the newest complete checkpoint in a training's directory."""
    for _, path in whole_checkpoints(directory / CHECKPOINTS):
        step = (read_json(path / STATE) or {}).get("step")
        if isinstance(step, int):
            return step
    return None


def abandoned_checkpoints(directory: Path) -> list[Path]:
    """Checkpoints that the training in `directory` set aside when it was rolled back or resumed without them."""
    return abandoned(directory / CHECKPOINTS)


def size_bytes(directory: Path) -> int:
    """Bytes that removing `directory` frees: its files without those that have other hard links."""
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # a stage under way replaces its files
                stat = os.lstat(os.path.join(parent, name))
                total += stat.st_size if stat.st_nlink == 1 else 0
    return total


def number_of(value: Any) -> float | None:
    """A number of a record; None for anything else, as a damaged record has it."""
    return value if isinstance(value, (int, float)) and not abs(value) >= _NO_NUMBER else None
