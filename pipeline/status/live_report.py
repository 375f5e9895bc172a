"""The page on the whole run: what it shows, and how a run keeps it fresh."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.console import log
from common.secrets import redact
from pipeline.settings.load import load
from pipeline.settings.sections import Settings
from pipeline.status.chain import ChainTask, StageTask, chain
from pipeline.status.states import statuses
from stages.directory.manifest import IDENTITY
from stages.report import PAGE, refresh
from stages.view.curves import MetricsFile
from stages.view.run import Run

#: What the page and the card show; others may hold what proves who asks.
_SHOWN = ("run", "corpus", "dataset", "model", "phase1", "phase2", "precision", "cluster", "evaluation")
#: A page is not written again before so many times the time that it took.
_AT_MOST_SHARE = 50


def shown(settings: Settings) -> dict[str, dict[str, str]]:
    """The settings by section, as text."""
    sections = {name: getattr(settings, name).param_kwargs for name in _SHOWN}
    return {name: {key: _text(value) for key, value in keys.items()} for name, keys in sections.items()}


def _text(value: Any) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else redact(str(value))


def stage_directories(task: StageTask) -> list[Path]:
    """Where everything that `task` is made from is, in running order; what was removed since is left out."""
    return [up.directory for up in chain(task) if up is not task and (up.directory / IDENTITY).exists()]


def view(goal: ChainTask, metrics: dict[Path, MetricsFile] | None = None) -> Run:
    """The chain up to `goal` as it is now. `metrics`: of an earlier look, so that only what is new is read."""
    return Run(statuses(goal), shown(load()), {} if metrics is None else metrics)


@contextlib.contextmanager
def refresh_periodically(goal: ChainTask) -> Iterator[None]:
    """Writes the page every [run] report_interval_s while the block runs, and when it ends, however it ends. Trouble
    with the page is said once, and is no trouble of the run."""
    interval_s = load().run.report_interval_s
    path, metrics, ended = load().work_dir / PAGE, dict[Path, MetricsFile](), threading.Event()
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

    def keep_writing() -> None:
        while not ended.wait(max(interval_s, _AT_MOST_SHARE * write())):
            pass

    thread = threading.Thread(target=keep_writing, daemon=True)
    if interval_s:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if interval_s:
            thread.join()
        write()
