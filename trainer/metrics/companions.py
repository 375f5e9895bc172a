"""The processes that send a training's numbers to trackers, alongside it: one for each tracker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from common.errors import one_line
from common.options import words
from common.process import PARENT_VARIABLE
from common.secrets import hidden_words
from trainer.metrics.trackers.base import TrackedRun
from trainer.metrics.trackers.options import TrackerOptions


class Companions:
    """Those of the training in `directory`. Nobody waits longer for them than `end` is told, whatever happens."""

    def __init__(self, directory: Path, options: TrackerOptions, log: Callable[[str], None]) -> None:
        self._directory, self._options, self._log = directory, options, log
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def begin(self, parameters: Mapping[str, Any], *, last_step: int) -> None:
        """Record the run, and start them. `parameters`: its settings; `last_step`: global step at which it is complete.

        Raises `DiskError`.
        """
        if self._options.remote:
            TrackedRun.begin(self._directory, parameters, last_step)
            self._start(subprocess.PIPE, None)

    def send(self, results: Path | None) -> None:
        """Start them for a training that is over. `results`: manifest of its evaluation, to be sent too."""
        self._start(subprocess.DEVNULL, results)

    def _start(self, stdin: int, results: Path | None) -> None:
        given = words(self._options, *(() if results is None else ("--results", str(results))))
        for name in self._options.remote:
            try:
                self._processes[name] = subprocess.Popen(
                    [sys.executable, "-m", "trainer.metrics.sending", name, str(self._directory), *given],
                    stdin=stdin, stdout=subprocess.DEVNULL, start_new_session=True,
                    env={**os.environ, **hidden_words(given), PARENT_VARIABLE: str(os.getpid())},
                )  # fmt: skip
            except OSError as error:
                self._log(f"note: {name} gets nothing in this run: {one_line(error)}")

    def end(self, wait_s: float) -> bool:
        """Have them send the rest within `wait_s` seconds; returns whether each tracker has all, and logs it if not."""
        deadline, lacking = time.monotonic() + wait_s, []
        for process in self._processes.values():
            if process.stdin is not None:
                process.stdin.close()
        for name, process in self._processes.items():
            try:
                status = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                status = process.wait()
            if status:
                lacking.append(name)
        self._processes.clear()
        if lacking:
            self._log(
                f"note: not all of {self._directory} has reached {' and '.join(lacking)}; the next run sends the rest, "
                f"or python -m pipeline trackers"
            )
        return not lacking
