"""What is there: the stages of a chain in running order, the directories on disk, who holds them, what differs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.bert import BertPhase2
from pipeline.goal import Goal
from pipeline.latest import LATEST
from pipeline.launchers import find_job
from pipeline.launchers.jobs import Job, Unreachable
from pipeline.mnist import MnistMlp
from pipeline.settings import load
from pipeline.stage import Stage
from pipeline.training import Training
from stages.lock import LOCK, is_held
from stages.manifest import IDENTITY, MANIFEST, difference, why_incomplete
from trainer.errors import UserError
from trainer.files import read_json

_NAME = re.compile(r"(?P<label>[a-z][a-z0-9_]*(?:-phase[0-9]+)?)-(?P<short>[0-9a-f]{10})")
_MLP_LABELS = ("download_mnist", "train_mlp", "evaluate_mlp")
_CHECKPOINT = re.compile(r"ckpt_([0-9]+)")
_HASH = re.compile(r"\b([0-9a-f]{10})[0-9a-f]{54}\b")


# The chain.


class Everything(Goal):
    """All goals that somebody has had: BERT, and the MLP where something of it is there."""

    def requires(self) -> dict[str, Stage]:
        goals: list[Goal] = [BertPhase2()]  # type: ignore[no-untyped-call]
        if any(list(load().work_dir.glob(f"{label}-*")) for label in _MLP_LABELS):
            goals.append(MnistMlp())  # type: ignore[no-untyped-call]
        return {name: task for goal in goals for name, task in goal.requires().items()}


def everything() -> Goal:
    """What all chains are for."""
    return Everything()  # type: ignore[no-untyped-call]


def chain(goal: Goal | Stage) -> list[Stage]:
    """Every stage that `goal` is made from, itself included, in running order: by depth, then by name."""
    depths: dict[Stage, int] = {}

    def depth(task: Stage) -> int:
        if task not in depths:
            depths[task] = max((depth(upstream) + 1 for upstream in task.requires().values()), default=0)
        return depths[task]

    for task in [goal] if isinstance(goal, Stage) else goal.requires().values():
        depth(task)
    return sorted(depths, key=lambda task: (depths[task], task.label))


def is_complete(task: Stage) -> bool:
    """Whether `task` is complete; False too when its identity cannot be computed."""
    try:
        return why_incomplete(task.directory, task.identity.fingerprint) is None
    except UserError:
        return False


def would_run(goal: Goal | Stage) -> list[Stage]:
    """The stages that a run of `goal` would start, in running order: luigi does not look behind a complete one."""
    needed: set[Stage] = set()

    def need(task: Stage) -> None:
        if task not in needed and not is_complete(task):
            needed.add(task)
            for upstream in task.requires().values():
                need(upstream)

    for task in [goal] if isinstance(goal, Stage) else goal.requires().values():
        need(task)
    return [task for task in chain(goal) if task in needed]


# The disk.


@dataclass(frozen=True)
class Place:
    """A stage directory, of whatever settings."""

    path: Path
    #: `<stage>[-phase<N>]`, as in its name.
    label: str
    #: Its manifest.json, or stage.json where there is none.
    record: dict[str, Any]
    #: When that was written, in seconds since 1970.
    written: float

    @property
    def fingerprint(self) -> str:
        return str(self.record["fingerprint"])

    @property
    def is_complete(self) -> bool:
        return why_incomplete(self.path, self.fingerprint) is None


class Shelf:
    """All stage directories of a work directory: those whose name and record agree; nothing else in it counts."""

    def __init__(self, work_dir: Path) -> None:
        self.work_dir = work_dir
        self.by_label: dict[str, list[Place]] = defaultdict(list)
        self.places = sorted(_places(work_dir), key=lambda place: place.written, reverse=True)
        for place in self.places:
            self.by_label[place.label].append(place)

    def others(self, task: Stage) -> list[Place]:
        """The directories of the same stage made with other settings, newest first."""
        return [place for place in self.by_label[task.label] if place.fingerprint != task.identity.fingerprint]

    def of_fingerprint(self, fingerprint: str) -> Place | None:
        return next((place for place in self.places if place.fingerprint == fingerprint), None)

    def linked(self) -> set[Path]:
        """What the links in `latest/` point to."""
        latest = self.work_dir / LATEST
        links = latest.iterdir() if latest.is_dir() else iter(())
        return {link.resolve() for link in links if link.is_symlink()}


def _places(work_dir: Path) -> Iterator[Place]:
    for path in work_dir.iterdir() if work_dir.is_dir() else ():
        name = _NAME.fullmatch(path.name)
        if name is None or path.is_symlink() or not path.is_dir():
            continue
        for file in (path / MANIFEST, path / IDENTITY):
            record = read_json(file)
            if record is not None:
                phase = record.get("phase")
                label = f"{record.get('stage')}" + ("" if phase is None else f"-phase{phase}")
                if label == name["label"] and str(record.get("fingerprint"))[:10] == name["short"]:
                    yield Place(path, label, record, file.stat().st_mtime)
                break


@dataclass(frozen=True)
class Holder:
    """Who is at work in a stage directory: a process, as the lock file says, a scheduler's job, or the one waiting for
    the other."""

    host: str
    pid: int | None
    started: str | None
    #: The job and its state: `slurm job 12: RUNNING (on n[1-2])`.
    job: str | None = None

    def __str__(self) -> str:
        return self.job or f"process {self.pid or '?'} on {self.host}"


def holder(directory: Path) -> Holder | None:
    """Who is at work in `directory`, or None. Nothing is changed; of a job its scheduler is asked."""
    record = (read_json(directory / LOCK) or {}) if is_held(directory) else None
    job = find_job(directory)
    state = None if job is None else _state(job)
    if record is None and state is None:
        return None
    record = record or {}
    started = record.get("started") if job is None or state is None else job.submitted
    return Holder(str(record.get("host", "?")), record.get("pid"), started, state)


def _state(job: Job) -> str | None:
    """What is known of a job; None if it is over."""
    try:
        state = job.state()
    except (Unreachable, UserError) as error:
        return f"{job}: unknown ({error})"
    return f"{job}: {state}" if state is not None and state.is_alive else None


def last_checkpoint_step(directory: Path) -> int | None:
    """The optimizer step, within its phase, of the newest finished checkpoint in a training's directory."""
    found = [(int(m[1]), path) for path in directory.glob("checkpoints/*") if (m := _CHECKPOINT.fullmatch(path.name))]
    for _, path in sorted(found, reverse=True):
        state = read_json(path / "state.json")
        if state is not None and (path / MANIFEST).exists():
            return int(state["step"])
    return None


def steps_of(task: Stage) -> int | None:
    """The optimizer steps of a training; None for any other stage, or where only the data tells."""
    return task.max_steps if isinstance(task, Training) else None


# What differs.


def cause(task: Stage, shelf: Shelf) -> str | None:
    """The first setting or input in which `task` differs from the newest other directory of its stage, followed
    through upstream stages to where it comes from: `lr: 0.001 → 0.0005`; None if there is no other directory."""
    others = shelf.others(task)
    return _cause(task, others[0].record, shelf) if others else None


def _cause(task: Stage, old: dict[str, Any], shelf: Shelf) -> str:
    changed = first_difference(old, task.identity.record())
    upstream = {name: up for name, up in task.requires().items() if changed.startswith(f"upstream.{name}:")}
    for name, up in upstream.items():
        before = old.get("upstream", {}).get(name)
        if before is None:
            break
        place = shelf.of_fingerprint(before)
        verb = "changed" if is_complete(up) else "would change"
        if place is None:
            return f"its upstream {up.label} {verb} (the one before, {before[:10]}, is not there any more)"
        deeper = _cause(up, place.record, shelf)
        return deeper if deeper.startswith("its upstream ") else f"its upstream {up.label} {verb}: {deeper}"
    return changed


def first_difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """`stages.manifest.difference`, by single values (`model.hidden_size: 128 → 256`) and with hashes cut short."""
    text = difference(_flat(old), _flat(new)) or "fingerprint"
    return _HASH.sub(r"\1…", text)


def _flat(record: dict[str, Any]) -> dict[str, Any]:
    """The record with the objects among its parameters and inputs laid open, one level."""
    flat = dict(record)
    for part in ("parameters", "inputs"):
        values: dict[str, Any] = {}
        for key, value in (record.get(part) or {}).items():
            values |= {f"{key}.{inner}": v for inner, v in value.items()} if isinstance(value, dict) else {key: value}
        flat[part] = values
    return flat
