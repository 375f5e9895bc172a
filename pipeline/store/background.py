"""Processes that push to the store alongside luigi and its stages (`python -m stages.sync`)."""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from common.console import log
from common.errors import EXIT_LEASE_LOST
from common.options import words
from common.process import PARENT_VARIABLE
from common.secrets import hidden_words
from stages.store.options import StoreOptions

#: Their output, in the stage's directory.
_LOG = "store.log"
#: Seconds after which a companion that died is started again, and between log lines while a push is awaited.
_AGAIN_S, _SAY_EVERY_S = 5.0, 30.0
#: Seconds in which a companion ends when asked to.
_PATIENCE_S = 5.0


class CompanionProcess:
    """The process alongside a stage. Restarted if it dies; if it has lost the lease, this process is asked to stop."""

    def __init__(self, options: StoreOptions, label: str, directory: Path, holder: str, token: int) -> None:
        self._label, self._directory = label, directory
        mine = ("accompany", str(directory), "--holder", holder, "--token", str(token))
        self._words = ["-m", "stages.sync", *mine, *words(options)]
        self.lost = ""
        self._over, self._starting = threading.Event(), threading.Lock()
        self._process = self._start()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _start(self) -> subprocess.Popen[bytes]:
        return start_sync(self._words, self._directory)

    def _watch(self) -> None:
        while not self._over.is_set():
            status = self._process.wait()
            if self._over.is_set() or status == 0:
                return
            if status == EXIT_LEASE_LOST:
                self.lost = _last_line(self._directory)
                log(f"{self._label}: {self.lost}; stopping")
                os.kill(os.getpid(), signal.SIGTERM)
                return
            log(f"{self._label}: note: the process that pushes to the store ended ({_last_line(self._directory)}); "
                f"restarting it in {_AGAIN_S:g} s")  # fmt: skip
            self._over.wait(_AGAIN_S)
            with self._starting:
                if self._over.is_set():
                    return
                self._process = self._start()

    def stop(self) -> None:
        with self._starting:
            self._over.set()
        self._process.terminate()
        try:
            self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:  # stopped, or it hangs in the kernel
            self._process.kill()
            self._process.wait()
        self._thread.join()

    def leave(self) -> None:
        """Let it push the complete stage; this process waits for it before it ends."""
        with self._starting:
            self._over.set()
        await_at_exit(self._process, self._label, self._directory)


def start_sync(sync: Sequence[str], directory: Path) -> subprocess.Popen[bytes]:
    """Start `python -m stages.sync …`, which dies with this process; its output goes to a log in `directory`."""
    with (directory / _LOG).open("ab") as file:
        return subprocess.Popen(
            [sys.executable, *sync], stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
            env={**os.environ, **hidden_words(sync), PARENT_VARIABLE: str(os.getpid())},
        )  # fmt: skip


def _last_line(directory: Path) -> str:
    lines = (directory / _LOG).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1].removeprefix("error: ") if lines else "it said nothing"


_pending: list[tuple[subprocess.Popen[bytes], str, Path]] = []
_unpushed: dict[Path, tuple[StoreOptions, str]] = {}


def _belongs_to_parent() -> None:
    """In a forked process: what its parent pushes, the parent awaits."""
    _pending.clear()
    _unpushed.clear()


os.register_at_fork(after_in_child=_belongs_to_parent)


def await_at_exit(process: subprocess.Popen[bytes], label: str, directory: Path) -> None:
    """Wait for a push when this process ends; in one of luigi's worker processes, wait now."""
    _at_exit()
    _pending.append((process, label, directory))
    if multiprocessing.parent_process() is not None:
        _await_pushes()


def push_at_exit(options: StoreOptions, label: str, directory: Path) -> None:
    """Push a complete stage at the end of this process, if no run has pushed it yet."""
    if multiprocessing.parent_process() is not None or directory in _unpushed:
        return
    from stages.store.complete import is_marked

    if not is_marked(directory, options.place):
        _at_exit()
        _unpushed[directory] = (options, label)


@functools.cache
def _at_exit() -> None:
    atexit.register(_await_pushes)


def _await_pushes() -> None:
    under_way = {directory for _, _, directory in _pending}
    for directory, (options, label) in _unpushed.items():
        if directory not in under_way:
            sync = ["-m", "stages.sync", "push", str(directory), *words(options)]
            _pending.append((start_sync(sync, directory), label, directory))
    _unpushed.clear()
    while _pending:
        process, label, directory = _pending.pop(0)
        began = said = time.monotonic()
        try:
            while process.poll() is None:
                time.sleep(0.05)
                if time.monotonic() - said > 3.0:
                    said = time.monotonic() + _SAY_EVERY_S
                    log(f"{label}: being pushed to the store ({time.monotonic() - began:.0f} s)")
        except KeyboardInterrupt:
            log(f"{label}: not pushed: interrupted; the next run pushes it")
            return
        if process.returncode:
            log(f"{label}: note: not pushed: {_last_line(directory)}; the next run tries again")
