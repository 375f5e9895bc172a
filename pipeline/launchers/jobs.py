"""A scheduler's job: submitted, watched, and found again by the next run if this one ends first.

Two files in the stage directory. job.json (`stages.directory.lock.JOB`), written by whoever submits: what is run, the
job's name and, once the scheduler has answered, its id; removed when the end has been seen. job-state.json, written by
the job (`supervisor`): how often it was started, and how it ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from common.console import log
from common.errors import EXIT_INTERRUPTED, EXIT_SOFTWARE, EXIT_USER_ERROR, UserError
from common.files import read_json, utc_now, write_json
from common.process import USER_STOP_SIGNALS
from pipeline.console.base import Said
from pipeline.console.select import console
from pipeline.launchers.base import Detached, StageCommand
from pipeline.launchers.process import ProcessResult, handling
from stages.directory.lock import JOB
from stages.directory.manifest import MANIFEST, directory_name

STATE = "job-state.json"
#: What was submitted, to Slurm or to Kubernetes, for whoever looks.
SCRIPT, OBJECTS = "job.sh", "job.yaml"
LOG = "stage.log"
#: Seconds between reads of the log, and the shortest and longest time between queries to the scheduler.
_LOOK_EVERY_S, _ASK_EVERY_S = 0.5, (1.0, 15.0)
#: Seconds for which a job must stay ended without a result before it counts as over, not as about to be restarted.
_SURE_S = 5.0


class Unreachable(Exception):
    """The scheduler does not answer at present; its message."""


def job_name(label: str, fingerprint: str, token: str) -> str:
    """A unique name that schedulers accept."""
    return f"{directory_name(label, fingerprint)}-{token}".replace("_", "-")


@dataclass(frozen=True)
class State:
    """A job's state, from the scheduler."""

    #: The scheduler's name for it: PENDING, RUNNING, …
    name: str
    #: Why, or where.
    detail: str
    #: Whether it runs or will run.
    is_alive: bool
    #: Whether a person cancelled it.
    is_cancelled: bool = False
    #: Whether it waits for a condition that can never hold.
    is_stuck: bool = False

    def __str__(self) -> str:
        return f"{self.name} ({self.detail})" if self.detail else self.name


class Scheduler(Protocol):
    """A batch scheduler. All methods raise `UserError` if its command-line tools are missing."""

    name: str
    #: What its job's record tells in addition to the job's name: where to find it, and how long to wait for it.
    place: dict[str, Any]

    def submit(self, work: StageCommand, job: Job) -> str:
        """Submit the job; returns its id. Raises `UserError` with the scheduler's message if it is refused."""
        ...

    def find(self, record: dict[str, Any]) -> str | None:
        """The id of the job of that name and place, or None. Raises `Unreachable`."""
        ...

    def ask(self, job_id: str) -> State | None:
        """The state of a job; None if the scheduler does not know it. Raises `Unreachable`."""
        ...

    def cancel(self, job_id: str) -> None:
        """Cancel a job, if it still exists. Raises `Unreachable`."""
        ...

    def tidy(self, job_id: str) -> None:
        """Best effort: remove what a finished job has left with the scheduler."""
        ...


class Job:
    """A submitted command."""

    def __init__(self, directory: Path, record: dict[str, Any], scheduler: Scheduler) -> None:
        self.directory, self.record, self._scheduler = directory, record, scheduler

    @classmethod
    def submit(cls, work: StageCommand, scheduler: Scheduler) -> Job:
        """Submit `work`. Raises `UserError`, and then leaves nothing behind."""
        token = secrets.token_hex(4)
        log_path = work.directory / LOG
        record = {
            "launcher": scheduler.name,
            **scheduler.place,
            "token": token,
            "name": job_name(work.label, work.fingerprint, token),
            "words": work.words,
            "fingerprint": work.fingerprint,
            "nodes": work.nodes,
            "resumes": work.resumes,
            "hang_timeout_s": work.hang_timeout_s,
            "log_began": log_path.stat().st_size if log_path.exists() else 0,
            "submitted": utc_now(),
        }
        job = cls(work.directory, record, scheduler)
        write_json(
            work.directory / JOB, record
        )  # before the job exists: if this process dies here, the job is found by its name
        try:
            job.record["id"] = scheduler.submit(work, job)
        except UserError:
            job.forget()
            raise
        if (work.directory / JOB).exists():  # else the job has ended already
            write_json(work.directory / JOB, record)
        log(f"{work.label}: {job}")
        return job

    def __str__(self) -> str:
        return f"{self._scheduler.name} job {self.id or self.record['name']}"

    @property
    def id(self) -> str | None:
        found: str | None = self.record.get("id")
        return found

    @property
    def submitted(self) -> str:
        """When it was submitted, UTC."""
        return str(self.record["submitted"])

    def state(self) -> State | None:
        """Its state; None if the scheduler does not know it. Raises `Unreachable`, `UserError`."""
        if self.id is None:  # the submitting process died before it had the answer
            self.record["id"] = self._scheduler.find(self.record)
        return None if self.id is None else self._scheduler.ask(self.id)

    def is_alive(self) -> bool:
        """Whether it runs or will run; True if the scheduler is unreachable. Raises `UserError`."""
        try:
            state = self.state()
        except Unreachable:
            return True
        return state is not None and state.is_alive

    def cancel(self) -> None:
        """Cancel it, so that a process waiting for it does not submit it again. Raises `Unreachable`, `UserError`."""
        self.state()
        if self.id is not None:
            if (self.directory / JOB).exists():
                write_json(self.directory / JOB, {**self.record, "is_cancelled": True})
            self._scheduler.cancel(self.id)

    def result(self) -> ProcessResult | None:
        """The result that its supervisor wrote, or None."""
        state = read_json(self.directory / STATE) or {}
        if state.get("token") != self.record["token"] or state.get("result") is None:
            return None
        return ProcessResult(**state["result"])

    def forget(self) -> None:
        """Remove its record, now that its end has been handled."""
        (self.directory / JOB).unlink(missing_ok=True)
        if self.id is not None:
            self._scheduler.tidy(self.id)

    def wait(self, *, from_start: bool) -> ProcessResult:
        """Show its log, from its start or only new lines, and its states until it is over; then forget it.

        Raises `Detached` on SIGINT, SIGTERM and SIGHUP: the job continues. `UserError`.
        """
        log_path = self.directory / LOG
        is_new = from_start or not log_path.exists()
        tail = _Tail(log_path, self.record["log_began"] if is_new else log_path.stat().st_size)
        label = self.directory.name.rpartition("-")[0]
        with console().running(label, self.directory) as said:
            with _noted_signals() as signals:
                state = self._watch(tail, said, signals)
            result = self._how_it_ended(state)
            if state is not None and state.is_stuck:
                try:
                    self.cancel()
                except Unreachable as error:
                    log(f"note: {self} was not cancelled: {error}")
            tail.show(said)
        self.forget()
        # With status 0 it was the job that was told to stop, for example before its time limit, not this process.
        stopped_by = result.stopped_by if result.status else None
        return dataclasses.replace(result, last_line=tail.last_line, stopped_by=stopped_by)

    def _watch(self, tail: _Tail, said: Said, signals: list[int]) -> State | None:
        """Watch until the job is over; returns its last state."""
        shown, interval_s, asked, over_since = "", _ASK_EVERY_S[0], 0.0, None
        result: ProcessResult | None = None
        while True:
            tail.show(said)
            if signals:
                raise Detached(str(self))
            # A result may be that of a pod which is replaced later: a preempted job waits in its queue for hours.
            if (last := self.result()) != result:
                result, interval_s = last, _ASK_EVERY_S[0]
            now = time.monotonic()
            if now - asked >= (_ASK_EVERY_S[0] if over_since else interval_s):
                asked, interval_s = now, min(interval_s * 1.5, _ASK_EVERY_S[1])
                try:
                    state = self.state()
                except Unreachable as error:
                    text, over_since = f"does not answer, asking again ({error})", None
                else:
                    text = "unknown" if state is None else str(state)
                    over = state is None or not state.is_alive or state.is_stuck
                    over_since = (over_since or now) if over else None
                    # After a node failure the scheduler may requeue the job a moment later.
                    if over_since and (result or now - over_since >= _SURE_S):
                        return state
                if text != shown:
                    shown, interval_s = text, _ASK_EVERY_S[0]
                    log(f"{self}: {text}")
            time.sleep(_LOOK_EVERY_S)

    def _how_it_ended(self, state: State | None) -> ProcessResult:
        """Its own result, else what the scheduler's last state says: cancelled, failed, stuck, killed or unknown."""
        result = self.result()
        noted = read_json(self.directory / JOB) or {}
        cancelled = (state is not None and state.is_cancelled) or noted.get("is_cancelled")
        # A status of 0 alone proves nothing: srun may exit with it after scancel.
        if cancelled and (result is None or result.status or not (self.directory / MANIFEST).exists()):
            return ProcessResult(EXIT_INTERRUPTED, signal.SIGTERM, False, f"{self} was cancelled")
        # On Kubernetes node 0 writes the result, and is told to stop when another node has failed.
        if result is not None and result.interrupted and state is not None and state.name == "Failed":
            text = f"{self} failed: {state.detail}; see {self.directory / 'stage*.log'}"
            return ProcessResult(EXIT_SOFTWARE, None, False, text, is_final=True)
        if result is not None:
            return result
        if state is not None and state.is_stuck:
            text = f"{self} can never start as it is: {state.detail}; check nnodes and the section "
            return ProcessResult(EXIT_USER_ERROR, None, False, f"{text}[{self._scheduler.name}] of luigi.cfg")
        said = f"is gone in state {state}" if state is not None else "is no longer known"
        logs = sorted(self.directory.glob("job-*.log"), key=lambda path: path.stat().st_mtime)
        hint = f"; see {logs[-1]}" if logs else ""
        return ProcessResult(EXIT_SOFTWARE, None, False, f"{self} {said}, with no record of how it ended{hint}")


class JobLauncher:
    """Submits a job and waits for it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def run(self, work: StageCommand) -> ProcessResult:
        return Job.submit(work, self._scheduler).wait(from_start=True)


class _Tail:
    """Shows lines appended to a file."""

    def __init__(self, path: Path, position: int) -> None:
        self._path, self._position = path, position
        self.last_line = ""

    def show(self, said: Said) -> None:
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._position)
            text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._position += len(whole)
            for line in filter(str.strip, whole.decode(errors="replace").splitlines()):
                said(line, False)
                self.last_line = line


@contextlib.contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """Collect SIGINT, SIGTERM and SIGHUP instead of acting on them."""
    noted: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        noted.append(signum)

    with handling(USER_STOP_SIGNALS, note):
        yield noted
