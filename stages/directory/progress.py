"""A stage's signs of life: a progress bar, progress.json, and the file `alive` while it computes silently."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from common.errors import DiskError
from common.files import ALIVE, PROGRESS, disk_errors, replace_json, utc_now
from common.process import HEARTBEAT_THREAD
from common.threads import beside

#: Seconds between two readings of the processor time, and the least increase that counts as work: idle threads and
#: pools use a tenth of that.
_LOOK_S, _LEAST_CPU_S = 5.0, 0.05


class Progress:
    """A tqdm bar on stderr that also rewrites progress.json; a context manager.

    progress.json: {"label", "done", "total", "unit", "per_s", "updated"}.
    """

    def __init__(self, path: Path, label: str, total: int, unit: str, done: int) -> None:
        from tqdm import tqdm

        self._path = path
        self._bar = tqdm(
            desc=label, total=total, initial=done, unit=" " + unit, unit_scale=True, mininterval=0.5, ncols=100,
            file=sys.stderr, leave=True,
        )  # fmt: skip
        self._record = {"label": label, "total": total, "unit": unit}
        self._first, self._began, self._written = done, time.monotonic(), 0.0

    def update(self, n: int = 1) -> None:
        """Count `n` more units."""
        self._bar.update(n)
        now = time.monotonic()
        if now - self._written < 1.0:
            return
        self._written = now
        per_s = (self._bar.n - self._first) / max(now - self._began, 1e-9)
        record = {**self._record, "done": self._bar.n, "per_s": round(per_s, 3), "updated": utc_now()}
        with disk_errors(self._path):
            replace_json(self._path, record)

    def note(self, line: str) -> None:
        """Print a line without disturbing the bar."""
        self._bar.write(f"note: {line}", file=sys.stderr)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


@contextlib.contextmanager
def transfer(directory: Path, label: str, total: int) -> Iterator[Progress]:
    """Progress of a transfer, in bytes; progress.json goes with the block, however that ends."""
    try:
        with Progress(directory / PROGRESS, label, total, "B", 0) as bar:
            yield bar
    finally:
        (directory / PROGRESS).unlink(missing_ok=True)


def signs_of_life(directory: Path) -> contextlib.AbstractContextManager[None]:
    """Touch DIRECTORY/alive while this process or its children use processor time, for the hang timeout of the process
    that started it. A process that is stopped, deadlocked or waiting for a dead disk does not touch it."""
    return beside(functools.partial(_beat, directory / ALIVE), name=HEARTBEAT_THREAD)


def _beat(path: Path, over: threading.Event) -> None:
    used = _cpu_s()
    while not over.wait(_LOOK_S):
        now = _cpu_s()
        if abs(now - used) >= _LEAST_CPU_S:  # it decreases when a child ends
            with contextlib.suppress(DiskError), disk_errors(path):  # the stage itself reports a full disk
                path.touch()
        used = now


def _cpu_s() -> float:
    """Processor seconds of this process, except this thread, and of all its descendants."""
    import psutil

    total = -time.thread_time()
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total
