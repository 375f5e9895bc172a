"""`python -m pipeline.launchers.supervisor DIR TOKEN`: what a scheduler's job runs, on its first node or on each node.

Runs the command in DIR/job.json as `luigi` would locally, with log and hang timeout. Restarts it as long as it saves
new checkpoints, and writes its result to DIR/job-state.json.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from common import forked
from common.errors import EXIT_INTERRUPTED, EXIT_SOFTWARE, UserError
from common.files import parse_utc, read_json, utc_now, write_json
from common.process import shell_status
from pipeline.console.select import console
from pipeline.launchers import kubernetes, process, slurm
from pipeline.launchers.jobs import STATE
from pipeline.launchers.process import LaunchSpec, ProcessResult
from pipeline.launchers.restarts import FINAL_STATUSES, MAX_RESTARTS, Restarts, newest_checkpoint
from stages.directory import attempts
from stages.directory.lock import JOB
from stages.directory.manifest import MANIFEST


class Surroundings(Protocol):
    """The scheduler, seen from inside its job."""

    #: The signal before a time limit; None: there is no limit.
    limit_signal: signal.Signals | None
    #: The index of this supervisor in the job; 0 handles restarts.
    rank: int
    #: Whether the scheduler has started the job before.
    is_restarted: bool

    def start(self, nodes: int, *, end_together: bool) -> LaunchSpec:
        """How to start the command; `end_together`: whether it ends on all nodes at about the same time."""
        ...

    def keeps_nodes(self) -> bool:
        """Whether all nodes of the job are there and healthy, as far as the scheduler knows."""
        ...

    def requeue(self) -> str | None:
        """Requeue the job, which ends this process. Returns the scheduler's message if it refuses; None if the command
        is to be restarted here instead."""
        ...


class Supervisor:
    """One start of a job."""

    def __init__(self, directory: Path, token: str, surroundings: Surroundings) -> None:
        self._directory, self._surroundings = directory, surroundings
        self._job = read_json(directory / JOB) or {}
        self._is_ours = self._job.get("token") == token
        before = read_json(directory / STATE) or {}
        self._state: dict[str, Any] = {"token": token, "queued": self._job.get("submitted")}
        if before.get("token") == token and surroundings.rank == 0:  # whose restarts it counts
            self._state = before
        self._early_signal: int | None = None

    def run(self) -> int:
        """Run the command to its end; returns the job's exit status."""
        if not self._is_ours:
            print(f"{self._directory / JOB} now belongs to another job, or its end was seen: there is nothing to do")
            return 0
        for signum in filter(None, (self._surroundings.limit_signal, signal.SIGTERM)):
            signal.signal(signum, self._note_early)
        restarts = Restarts(**self._state.get("restarts", {}))
        # A start that its scheduler stopped, to preempt or evict the job, is not a failed attempt.
        was_stopped = (self._state.get("result") or {}).get("stopped_by") is not None
        if (self._surroundings.is_restarted or self._state.get("starts")) and not was_stopped:
            restarts = restarts.at(self._step())
        error = self._state.get("error", "it was restarted by its scheduler")
        while not restarts.are_too_many:
            self._note(restarts=restarts.record(), starts=self._state.get("starts", 0) + 1, result=None)
            result = self._run_command()
            if result.status == 0 or not self._may_restart(result):
                return self._end(result)
            error = result.error
            self._note(error=error)
            restarts = restarts.at(self._step())
            if not restarts.are_too_many:
                refusal = None if self._may_stay(result, restarts) else self._requeue()
                if refusal is not None:  # the waiting luigi may submit it again
                    return self._end(
                        ProcessResult(EXIT_SOFTWARE, None, result.hung, f"{error} (not requeued: {refusal})")
                    )
        text = f"{error} (after {MAX_RESTARTS} restarts without a new checkpoint)"
        return self._end(ProcessResult(EXIT_SOFTWARE, None, False, text, is_final=True))

    def _note(self, **values: Any) -> None:
        """Save values for the next start, on the first node only."""
        self._state.update(values)
        if self._surroundings.rank == 0:
            write_json(self._directory / STATE, self._state)

    def _run_command(self) -> ProcessResult:
        if self._early_signal is not None:
            return ProcessResult(EXIT_INTERRUPTED, self._early_signal, False, "stopped before it had begun")
        first = self._surroundings.rank == 0
        queued = self._state.pop("queued", None)
        if first and queued is not None:
            attempts.record_wait(self._directory, "waiting in a queue", parse_utc(queued).timestamp())
        with attempts.recording(self._directory) if first else contextlib.nullcontext() as record:
            try:
                start = self._surroundings.start(self._job["nodes"], end_together=self._job["resumes"])
                if not start.prefix:
                    forked.start()
                result = process.run(
                    self._job["words"],
                    directory=self._directory,
                    fingerprint=self._job["fingerprint"],
                    keep_open=(),
                    showing=console().running(self._directory.name, self._directory),
                    hang_timeout_s=self._job["hang_timeout_s"],
                    start=start,
                    signalled=lambda: self._early_signal,
                )
            except UserError as error:
                result = ProcessResult(EXIT_SOFTWARE, None, False, str(error))
            if record is not None:
                record(result.how, result.status, result.error)
        return result

    def _may_restart(self, result: ProcessResult) -> bool:
        if result.stopped_by is not None:
            return result.stopped_by == self._surroundings.limit_signal
        return bool(self._job["resumes"]) and result.status not in FINAL_STATUSES

    def _requeue(self) -> str | None:
        self._note(queued=utc_now())
        refusal = self._surroundings.requeue()
        self._state.pop("queued")  # it continues here
        return refusal

    def _may_stay(self, result: ProcessResult, restarts: Restarts) -> bool:
        """Whether to restart the command on the same nodes, without waiting in the queue: only the first time that it
        fails at a step, and only if it failed by itself. After a second failure other nodes may do better."""
        was_told = result.stopped_by is not None or result.status == EXIT_INTERRUPTED  # time limit, spot notice
        return not was_told and not result.hung and restarts.count == 1 and self._surroundings.keeps_nodes()

    def _step(self) -> int:
        return newest_checkpoint(self._directory) if self._job["resumes"] else 0

    def _end(self, result: ProcessResult) -> int:
        """Write the result of the job."""
        self._note(result=dataclasses.asdict(result))
        if result.status == 0 and self._surroundings.rank == 0 and (self._directory / MANIFEST).exists():
            (self._directory / JOB).unlink(missing_ok=True)  # nothing is left to handle
        return shell_status(result.status)

    def _note_early(self, signum: int, frame: FrameType | None) -> None:
        self._early_signal = self._early_signal or signum


def main() -> int:
    directory, token = Path(sys.argv[1]), sys.argv[2]
    surroundings: dict[str, type[Surroundings]] = {"slurm": slurm.InJob, "kubernetes": kubernetes.InPod}
    launcher = (read_json(directory / JOB) or {}).get("launcher", "slurm")
    return Supervisor(directory, token, surroundings[launcher]()).run()


if __name__ == "__main__":
    sys.exit(main())
