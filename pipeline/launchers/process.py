"""Runs a stage's command as a child process: output to console and log, signals passed on, hangs detected."""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import select
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from common import console
from common.errors import EXIT_INTERRUPTED
from common.files import ALIVE, PROGRESS, disk_errors
from common.forked import start_python
from common.lock import HELD_FINGERPRINT_VARIABLE
from common.process import PARENT_VARIABLE, SAVING_S, USER_STOP_SIGNALS, is_ignored, processes_with
from common.secrets import hidden_words, redact
from pipeline.console.base import Said, nothing
from stages.directory.attempts import How

#: Seconds after the first signal in which further ones count as the same request: a closed terminal sends several.
_SAME_REQUEST_S = 1.0


@contextlib.contextmanager
def handling(signums: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle these signals, except ignored ones (nohup). Does nothing outside the main thread, where Python allows no
    handlers."""
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {signum: signal.signal(signum, handler) for signum in signums if not is_ignored(signum)}
    try:
        yield
    finally:
        for signum, handled in before.items():
            signal.signal(signum, handled)


@dataclass(frozen=True)
class ProcessResult:
    """How a command ended."""

    #: Its exit status, negative for a signal.
    status: int
    #: The signal with which this process was asked to stop it; None: it ended by itself.
    stopped_by: int | None
    #: Whether it was killed after the hang timeout.
    hung: bool
    #: Its `error:` line, else its traceback, else its last line, and whether it was killed.
    error: str
    #: Whether its supervisor has used up all restarts.
    is_final: bool = False
    #: The last line that it has said, and its last `error:` line.
    last_line: str = ""
    last_error: str = ""

    @property
    def interrupted(self) -> bool:
        """Whether it ended because this process was asked to stop."""
        return self.stopped_by is not None and self.status != 0

    @property
    def how(self) -> How:
        if self.interrupted or self.status == EXIT_INTERRUPTED:
            return "interrupted"
        if self.status == 0:
            return "complete"
        return "hung" if self.hung else "failed"


@dataclass(frozen=True)
class LaunchSpec:
    """How a command is started."""

    #: Words that start Python elsewhere; empty: it is a child of this process and dies with it.
    prefix: tuple[str, ...] = ()
    #: Additional environment variables.
    environment: Mapping[str, str] = field(default_factory=dict)
    #: The log file in the stage directory.
    log: str = "stage.log"
    #: Whether its output is shown on the console, too.
    is_shown: bool = True
    #: Signals to this process that request a stop, and the signal that is then sent to the command.
    signals: tuple[signal.Signals, ...] = USER_STOP_SIGNALS
    stop_signal: signal.Signals = signal.SIGTERM


class Command:
    """A running `python …`, with a process group of its own."""

    def __init__(self, words: list[str], start: LaunchSpec, *, fingerprint: str, keep_open: tuple[int, ...]) -> None:
        """`keep_open`: descriptors that it inherits, among them the stage's lock."""
        environment = {
            **os.environ,
            **start.environment,
            **hidden_words(words),
            HELD_FINGERPRINT_VARIABLE: fingerprint,
            **({} if start.prefix else {PARENT_VARIABLE: str(os.getpid())}),
            "PYTHONUNBUFFERED": "1",
        }
        output, written = os.pipe()
        self.output = open(output, "rb", buffering=0)  # noqa: SIM115 (closed in `end`)
        try:
            self.process = start_python(
                words, environment=environment, output=written, keep_open=keep_open, prefix=start.prefix
            )
        finally:
            os.close(written)
        self.stopped_by: int | None = None
        self._stopped_at = 0.0
        self._stop_signal = start.stop_signal

    def stop(self, signum: int, frame: FrameType | None) -> None:
        """Signal handler: the first signal asks the command to save and stop, a later second one kills it. SIGHUP never
        kills: when a terminal is closed, the kernel and the shell both send one."""
        if signum == signal.SIGHUP:
            console.detach_if_closed()
        if self.stopped_by is None:
            self.stopped_by, self._stopped_at = signum, time.monotonic()
            self.send(self._stop_signal)
        elif signum != signal.SIGHUP and time.monotonic() - self._stopped_at > _SAME_REQUEST_S:
            self.send(signal.SIGKILL)

    def send(self, signum: signal.Signals) -> None:
        """Signal the command's process group. Workers of a command that it kills save first (`SAVING_S`)."""
        self.process.signal_group(signum)

    def kill_with_workers(self) -> None:
        """Kill the command, and its workers here: those that hang cannot save, and must not go on when the command is
        started again. They are other processes' children, but write to the same pipe, by which Linux shows them;
        elsewhere they end by themselves (`SAVING_S`)."""
        self.send(signal.SIGKILL)
        for pid in processes_with(self.output.fileno()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        """Leave nothing of it running."""
        self.send(signal.SIGKILL)
        self.process.wait()
        self.output.close()


def run(
    words: list[str],
    *,
    directory: Path,
    fingerprint: str,
    keep_open: tuple[int, ...],
    showing: contextlib.AbstractContextManager[Said],
    hang_timeout_s: float | None = None,
    start: LaunchSpec | None = None,
    signalled: Callable[[], int | None] = lambda: None,
) -> ProcessResult:
    """Run `python words…` to its end, its output appended to its log, DIRECTORY/stage.log, below a line with the words.
    `showing`: what shows the output meanwhile, unless `start` says that nothing does. `signalled`: the signal, if any,
    that asked for a stop before this function had handlers.

    SIGINT, SIGTERM and SIGHUP to this process are passed on as SIGTERM; a second SIGINT or SIGTERM as SIGKILL. The
    command is killed if it neither writes a line nor touches progress.json or alive for `hang_timeout_s` seconds.
    """
    start = start or LaunchSpec()
    log_path = directory / start.log
    began = log_path.stat().st_size if log_path.exists() else 0
    command = Command(words, start, fingerprint=fingerprint, keep_open=keep_open)
    watch = _Watch([directory / PROGRESS, directory / ALIVE], hang_timeout_s)
    with handling(start.signals, command.stop):
        try:
            early = signalled()
            if early is not None:
                command.stop(early, None)
            with disk_errors(log_path), showing if start.is_shown else nothing() as said:
                _copy(command, log_path, watch, said, words)
            status = command.process.wait()
        finally:
            command.end()
    lines = _lines_since(log_path, began)
    return ProcessResult(
        status, command.stopped_by, watch.hung, _error(lines, status), last_line=lines[-1] if lines else "",
        last_error=next(iter(_errors(lines)[::-1]), ""),
    )  # fmt: skip


class _Watch:
    """Detects a command without signs of life."""

    def __init__(self, touched: list[Path], timeout_s: float | None) -> None:
        """`touched`: files that a command touches as a sign of life."""
        self._touched = touched
        self._timeout_s = timeout_s
        self._seen: dict[Path, int] = {}
        self._alive_at = time.monotonic()
        self.hung = False

    def heard(self) -> None:
        self._alive_at = time.monotonic()

    def is_hung(self) -> bool:
        for path in self._touched:
            with contextlib.suppress(FileNotFoundError):
                touched = path.stat().st_mtime_ns
                if touched != self._seen.get(path):
                    self._seen[path] = touched
                    self.heard()
        if self._timeout_s is not None and time.monotonic() - self._alive_at > self._timeout_s:
            self.hung = True  # whatever a process that is being killed may still touch
        return self.hung


def _lines_since(log_path: Path, began: int) -> list[str]:
    """The output of the command that began at byte `began` of its log."""
    with log_path.open("rb") as file:
        file.seek(began)
        lines = file.read().decode(errors="replace").splitlines()
    return [line for line in lines[1:] if line.strip()]


def _errors(said: list[str]) -> list[str]:
    return [line.removeprefix("error: ") for line in said if line.startswith("error: ")]


def _error(said: list[str], status: int) -> str:
    errors = _errors(said)
    if errors:
        return errors[0]
    for at, line in enumerate(said):
        if line.startswith("Traceback (most recent call last)"):
            return "\n".join(said[at:][:60])
    last = said[-1] if said else "it said nothing"
    return f"killed, usually for lack of memory; its last line: {last}" if -status == signal.SIGKILL else last


def _copy(command: Command, log_path: Path, watch: _Watch, said: Said, words: list[str]) -> None:
    """Copy lines to the log, and to `said`. A progress bar's lines, which overwrite each other, are not logged."""
    with log_path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(f"$ python {redact(shlex.join(words))}\n")
        file.flush()
        for raw, is_live in _lines(command, watch):
            line = redact(raw)
            if not is_live:
                file.write(line + "\n")
                file.flush()
            said(line, is_live)


def _lines(command: Command, watch: _Watch) -> Iterator[tuple[str, bool]]:
    """(text, whether the next overwrites it) for each piece that ends in a newline or carriage return."""
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    rest = ""
    for chunk in _chunks(command, watch):
        *pieces, rest = re.split(r"(\r\n|\r|\n)", rest + decode(chunk))
        for text, end in zip(pieces[::2], pieces[1::2], strict=True):
            if text.strip():
                yield text, end == "\r"
    if rest.strip():
        yield rest, False


def _chunks(command: Command, watch: _Watch) -> Iterator[bytes]:
    """The command's output, until it closes it. If it was killed, for a hang or otherwise, until the workers that it
    has left behind have ended, too."""
    output, ended = command.output.fileno(), None
    while True:
        ready, _, _ = select.select([output], [], [], 0.5)
        if ready:
            chunk = os.read(output, 1 << 16)
            if not chunk:
                return
            watch.heard()
            yield chunk
            continue
        status = command.process.poll()
        if watch.hung or (status is None and watch.is_hung()):
            command.kill_with_workers()  # again, if a worker was just being started
        if status is not None:
            ended = ended or time.monotonic()
            if status >= 0 or time.monotonic() - ended > SAVING_S:
                return  # what descendants still write to the pipe is not read
