"""The page on the whole run, and its refresh during a run."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.console import log
from common.secrets import redact
from common.threads import beside
from pipeline.settings.sections import Settings
from pipeline.status.chain import ChainGoal, StageTask, chain
from pipeline.status.states import statuses
from stages.directory.manifest import IDENTITY
from stages.report import PAGE, refresh
from stages.view.curves import MetricsFile
from stages.view.run import Run

#: The settings, as the command that writes the page reads them.
SETTINGS = "settings.json"
#: Sections that the page and the card show; others may hold credentials.
_SHOWN = ("run", "corpus", "dataset", "model", "phase1", "phase2", "precision", "cluster", "evaluation", "card")
#: The page is rewritten, at the earliest, after this many times the time that writing it took.
_AT_MOST_SHARE = 50


def settings_by_section(settings: Settings) -> dict[str, dict[str, str]]:
    """Those that the page and the card show, as text."""
    sections = {name: getattr(settings, name).param_kwargs for name in _SHOWN}
    return {name: {key: setting_text(value) for key, value in keys.items()} for name, keys in sections.items()}


def setting_text(value: Any) -> str:
    """A setting's value as luigi.cfg has it, without secrets."""
    return "" if value is None else str(value).lower() if isinstance(value, bool) else redact(str(value))


def stage_directories(task: StageTask) -> list[Path]:
    """The existing directories of the upstream stages of `task`, in running order."""
    return [up.directory for up in chain(task) if up is not task and (up.directory / IDENTITY).exists()]


def view(goal: ChainGoal, metrics: dict[Path, MetricsFile] | None = None) -> Run:
    """The present state of the chain up to `goal`. `metrics`: from an earlier call, so that only new lines are read."""
    return Run(statuses(goal), settings_by_section(goal.settings), {} if metrics is None else metrics)


@contextlib.contextmanager
def refresh_periodically(goal: ChainGoal) -> Iterator[None]:
    """Write the page every [run] report_interval_s during the block, and at its end. An error is logged once and does
    not affect the run."""
    interval_s = goal.settings.run.report_interval_s
    path, metrics = goal.settings.work_dir / PAGE, dict[Path, MetricsFile]()
    noted: list[str] = []

    def write() -> float:
        began = time.monotonic()
        try:
            refresh(path, view(goal, metrics))
        except Exception as error:
            if not noted:
                log(f"note: {path} was not written: {error}")
            noted.append(str(error))
        return time.monotonic() - began

    def keep_writing(over: threading.Event) -> None:
        while not over.wait(max(interval_s, _AT_MOST_SHARE * write())):
            pass

    try:
        with beside(keep_writing) if interval_s else contextlib.nullcontext():
            yield
    finally:
        write()
