"""The interface of trackers, and what they know of a training."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from common.errors import UserError
from common.files import METRICS, disk_errors, read_json, sha256_of, write_json
from trainer.checkpoint.directory import CHECKPOINTS, abandoned

#: The file in a training's directory that says which run it is for trackers.
RECORD = "trackers.json"
#: What an id must not contain.
_NO_NAME = re.compile(r"[^\w.-]", re.ASCII)


class Tracker(Protocol):
    """The curves of one training in one place. Methods raise whatever the tracker's library raises."""

    def add(self, step: int, scalars: Mapping[str, float], at: float) -> None:
        """The numbers of global step `step`, recorded `at` (seconds since 1970). Steps come in order, each once."""
        ...

    def flush(self) -> None:
        """Hand over what was added."""
        ...

    def close(self) -> None: ...


class RemoteTracker(Tracker, Protocol):
    """A tracker that is fed alongside the training, by `trainer.metrics.sending`, with steps that are final.

    Made with a `TrackedRun` and `TrackerOptions`, it begins the training's run there or continues it.
    """

    #: The last global step that it has; 0: none.
    last_step: int

    def summarise(self, results: Mapping[str, float]) -> None:
        """The numbers of an evaluation, by name. The same numbers may come again."""
        ...

    def close(self, *, is_whole: bool = False) -> None:
        """Hand over everything; `is_whole`: the training has reached its last step."""
        ...


def _identity(set_aside: Path) -> str:
    """Of a directory of set-aside checkpoints, whose number is used again once it is removed: its metrics, too. Raises
    `DiskError`."""
    with disk_errors(set_aside):
        return f"{set_aside.name} {sha256_of(set_aside / METRICS) if (set_aside / METRICS).exists() else ''}"


@dataclass(frozen=True)
class TrackedRun:
    """A training, as trackers know it: one run for each branch, as rolling back begins a new one."""

    directory: Path
    #: Made for the first branch, with a random part: the same settings may be trained in several places.
    base: str
    #: How often steps were set aside that trackers may have received (`trainer.checkpoint.directory.set_aside`).
    branch: int
    #: The settings, by name.
    parameters: Mapping[str, Any]
    #: The global step at which the training is complete.
    last_step: int

    @property
    def id(self) -> str:
        return f"{self.base}-{self.branch}" if self.branch else self.base

    @property
    def name(self) -> str:
        """What people see."""
        return self.id.replace(self.base, self.directory.resolve().name, 1)

    @classmethod
    def begin(cls, directory: Path, parameters: Mapping[str, Any], last_step: int) -> Self:
        """The run of the training in `directory`, recorded durably: the one of earlier starts, unless the training was
        rolled back since. Raises `DiskError`."""
        before = read_json(directory / RECORD) or {}
        base = before.get("base") or f"{_NO_NAME.sub('-', directory.resolve().name)[:64]}-{secrets.token_hex(4)}"
        set_aside = [_identity(path) for path in abandoned(directory / CHECKPOINTS)]
        known = before.get("set_aside", set_aside)
        known = set_aside[:known] if isinstance(known, int) else known  # a number in older records
        branch = before.get("branch", 0) + len({*set_aside} - {*known})
        run = cls(directory, base, branch, parameters, last_step)
        record = {**vars(run), "parameters": dict(parameters), "set_aside": set_aside}
        del record["directory"]
        if record != before:
            write_json(directory / RECORD, record)
        return run

    @classmethod
    def read(cls, directory: Path) -> Self:
        """The run that `begin` recorded. Raises `UserError`."""
        record = read_json(directory / RECORD) or {}
        try:
            names = ("base", "branch", "parameters", "last_step")
            return cls(directory, **{name: record[name] for name in names})
        except KeyError:
            raise UserError(
                f"{directory} has no usable {RECORD}: no tracker was set for its training; give the directory of one "
                f"that was started with --trackers"
            ) from None
