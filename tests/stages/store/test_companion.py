"""The process that accompanies the making of a stage takes little of the machine's time from it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stages.directory.manifest import MANIFEST
from stages.store import companion
from stages.store.companion import Companion


class BusyMachine:
    """A training run of 1,000 s with a checkpoint every 10 s, each of which takes a second of one core to push."""

    def __init__(self, directory: Path) -> None:
        self.now = self.used_s = 0.0
        self.made = self.pushed = 0
        self._directory = directory

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.made = int(self.now // 10)
        if self.now > 1000:
            (self._directory / MANIFEST).touch()

    def push(self) -> bool:
        if self.pushed == self.made:
            return False
        self.pushed = self.made
        self.used_s += 1.0
        self.sleep(2.0)  # it also waits for the store
        return True

    @property
    def clocks(self) -> SimpleNamespace:
        return SimpleNamespace(monotonic=lambda: self.now, process_time=lambda: self.used_s, sleep=self.sleep)


@pytest.mark.parametrize(("cores", "least"), [(1, 4), (2, 8), (10, 36), (64, 90)])
def test_checkpoints_that_would_take_more_than_their_share_of_the_cores_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, least: int
) -> None:
    machine = BusyMachine(tmp_path)
    monkeypatch.setattr(companion, "time", machine.clocks)
    monkeypatch.setattr(companion, "available_cores", lambda: cores)
    beside = Companion(cast(Any, None), cast(Any, None), tmp_path, "pretrain", "0123456789")
    monkeypatch.setattr(beside, "push_newest", machine.push)
    monkeypatch.setattr(beside, "renewing", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(beside, "_push_stage", lambda: None)
    beside.run()
    assert least <= machine.used_s <= 0.004 * cores * machine.now + 1  # one push was begun within its share
