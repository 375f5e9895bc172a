"""A training run that is killed: its command, its processes and its steps, whichever program trains."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from benchmarks.processes import start

#: Bytes at the end of metrics.jsonl that hold the latest steps: a hundred or so.
_TAIL = 40_000
#: (step, seconds since 1970 at its end), in the order in which they were done.
Steps = list[tuple[int, float]]


class Training:
    """A command that trains, in processes of its own, and the steps that it has recorded."""

    def __init__(
        self,
        words: Sequence[str],
        environment: dict[str, str],
        log: Path,
        steps: Callable[[int | None], Steps],
        disk: Path,
        *,
        ends_by_itself: bool = False,
    ) -> None:
        """`words`: after `python`; `steps`: those in the last so many bytes of its record, or in all of it for None;
        `disk`: the folder where it writes. `ends_by_itself`: what is left of a killed command may continue, to save;
        otherwise it is killed, too."""
        self._ends_by_itself = ends_by_itself
        self._words, self._log, self.steps, self.disk = list(words), log, steps, disk
        self._mark = uuid.uuid4().hex
        self._environment = {**environment, "BENCHMARK_MARK": self._mark}
        self._process: subprocess.Popen[bytes] | None = None
        #: How often its command has been started.
        self.starts = 0

    def keep_running(self) -> None:
        """Start it, or start it again if its command has ended."""
        if self.has_ended:
            if not self._ends_by_itself:
                self.end()
            self.starts += 1
            with self._log.open("ab") as file:
                self._process = start(*self._words, environment=self._environment, stdout=file, stderr=file)

    @property
    def has_ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    @property
    def said(self) -> str:
        """The end of its output."""
        return self._log.read_text()[-2000:]

    def processes(self) -> list[psutil.Process]:
        """All its processes that run now, even if those that started them are gone."""
        found = set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                # In forked ones, the process's name stands where the variables were.
                if process.environ().get("BENCHMARK_MARK") == self._mark:
                    found |= {process, *process.children(recursive=True)}
        return sorted(found, key=lambda process: process.pid)

    def end(self) -> None:
        while left := self.processes():
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            if self._process is not None:
                self._process.wait()
            time.sleep(0.05)


def luigi_training(directory: Path, config: str) -> Training:
    """Phase 1 under luigi, with these settings, in `directory`."""
    file = directory / "luigi.cfg"
    file.write_text(f"[run]\nwork_dir = {directory}/work\n{config}")

    def steps(tail: int | None) -> Steps:
        for path in (directory / "work").glob("pretrain-phase1-*/metrics.jsonl"):
            lines = path.read_bytes()[-(tail or 0) :].split(b"\n")
            # The first may be cut off, the last unfinished.
            records = [json.loads(line) for line in lines[1 if tail else 0 : -1]]
            return [(record["step"], record["time"]) for record in records]
        return []

    words = ("-m", "luigi", "--module", "pipeline", "Pretrain", "--phase", "1")
    where = {"LUIGI_CONFIG_PATH": str(file)}
    return Training(words, where, directory / "luigi.log", steps, directory / "work", ends_by_itself=True)


def latest_steps(training: Training) -> Steps:
    return training.steps(_TAIL)
