"""Which console shows this process's run."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable

from common.console import show_lines_with
from pipeline.console.base import Console
from pipeline.console.events import Events
from pipeline.console.live import Live
from pipeline.console.plain import Plain, Quiet

#: Values of [run] console.
AUTO, LIVE, PLAIN, QUIET, JSON = CONSOLES = ("auto", "live", "plain", "quiet", "json")

_chosen: Console | None = None


def choose_once(name: str) -> None:
    """Show the run on the console of this name, one of `CONSOLES`, unless a console is chosen already."""
    if _chosen is None:
        if name == AUTO:
            name = LIVE if sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb" else PLAIN
        made: dict[str, Callable[[], Console]] = {LIVE: Live, PLAIN: Plain, QUIET: Quiet, JSON: Events}
        _choose(made[name]())


def console() -> Console:
    """The console of this process. Stages that run at the same time, each in a process of its own, share a terminal and
    have no live line."""
    if _chosen is None or (isinstance(_chosen, Live) and multiprocessing.parent_process() is not None):
        return _choose(Plain())
    return _chosen


def _choose(chosen: Console) -> Console:
    """From now on `log` shows its lines there, too."""
    global _chosen
    _chosen = chosen
    show_lines_with(chosen.line)
    return chosen
