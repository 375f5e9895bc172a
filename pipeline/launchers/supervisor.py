"""`python -m pipeline.launchers.supervisor DIR TOKEN`: what a scheduler's job runs, on its first node or on each.

Runs the command that DIR/job.json names, as `luigi` would here: its log, and its end if it hangs. Says in
DIR/job-state.json how it ended; or has the job started again, as long as it gets further.
"""

from __future__ import annotations

import dataclasses
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from pipeline import launch
from pipeline.launch import Ending, Start
from pipeline.launchers.jobs import STATE
from pipeline.launchers.restarts import FINAL_STATUSES, Restarts, newest_checkpoint
from stages.lock import JOB
from stages.manifest import MANIFEST
from trainer.errors import EXIT_INTERRUPTED, EXIT_SOFTWARE, UserError
from trainer.files import read_json, write_json


class Surroundings(Protocol):
    """The scheduler, seen from inside of its job."""

    #: What it sends ahead of a time limit; None: it has none.
    limit_signal: signal.Signals | None
    #: Which of the job's supervisors this is: 0 looks after the restarts.
    rank: int
    #: Whether the job was started before.
    is_restarted: bool

    def start(self, nodes: int, *, end_together: bool) -> Start:
        """How the command is started; `end_together`: those of all nodes end at about the same time."""
        ...

    def requeue(self) -> str:
        """Have the job started again, and end this process; returns why that is not possible, in the scheduler's
        words."""
        ...


class Supervisor:
    """One start of a job."""

    def __init__(self, directory: Path, token: str, surroundings: Surroundings) -> None:
        self._directory, self._surroundings = directory, surroundings
        self._job = read_json(directory / JOB) or {}
        self._is_ours = self._job.get("token") == token
        before = read_json(directory / STATE) or {}
        self._state: dict[str, Any] = before if before.get("token") == token else {"token": token}
        self._early_signal: int | None = None

    def run(self) -> int:
        """The exit status of the job."""
        if not self._is_ours:
            print(f"{self._directory / JOB} is of another job by now, or its end was seen: there is nothing to do")
            return 0
        for signum in filter(None, (self._surroundings.limit_signal, signal.SIGTERM)):
            signal.signal(signum, self._note_early)
        first = self._surroundings.rank == 0
        if first:
            restarts = Restarts(**self._state.get("restarts", {}))
            if self._surroundings.is_restarted or self._state.get("starts"):
                restarts = restarts.at(self._step())
            if restarts.are_too_many:
                return self._end(self._enough(self._state.get("error", "it was put back into the queue")))
            self._state.update(restarts=restarts.record(), starts=self._state.get("starts", 0) + 1, ending=None)
            write_json(self._directory / STATE, self._state)
        ending = self._run_command()
        if not first:
            return _exit_status(ending)
        if ending.status == 0 or not self._may_restart(ending):
            return self._end(ending)
        if Restarts(**self._state["restarts"]).at(self._step()).are_too_many:
            return self._end(self._enough(ending.error))
        self._state["error"] = ending.error
        write_json(self._directory / STATE, self._state)
        refusal = self._surroundings.requeue()
        # Whoever waits for it may hand it in again.
        return self._end(Ending(EXIT_SOFTWARE, None, ending.hung, f"{ending.error} (not requeued: {refusal})"))

    def _run_command(self) -> Ending:
        if self._early_signal is not None:
            return Ending(EXIT_INTERRUPTED, self._early_signal, False, "stopped before it had begun")
        try:
            return launch.run(
                self._job["words"],
                directory=self._directory,
                fingerprint=self._job["fingerprint"],
                keep_open=(),
                hang_timeout_s=self._job["hang_timeout_s"],
                start=self._surroundings.start(self._job["nodes"], end_together=self._job["resumes"]),
            )
        except UserError as error:
            return Ending(EXIT_SOFTWARE, None, False, str(error))

    def _may_restart(self, ending: Ending) -> bool:
        if ending.stopped_by is not None:
            return ending.stopped_by == self._surroundings.limit_signal
        return bool(self._job["resumes"]) and ending.status not in (*FINAL_STATUSES, EXIT_INTERRUPTED)

    def _step(self) -> int:
        return newest_checkpoint(self._directory) if self._job["resumes"] else 0

    def _enough(self, error: str) -> Ending:
        count = Restarts(**self._state["restarts"]).count
        text = f"{error} (after {count} restarts without a new checkpoint)"
        return Ending(EXIT_SOFTWARE, None, False, text, is_final=True)

    def _end(self, ending: Ending) -> int:
        """It is over: say how."""
        write_json(self._directory / STATE, {**self._state, "ending": dataclasses.asdict(ending)})
        if ending.status == 0 and (self._directory / MANIFEST).exists():
            (self._directory / JOB).unlink(missing_ok=True)  # nobody has to see to it any more
        return _exit_status(ending)

    def _note_early(self, signum: int, frame: FrameType | None) -> None:
        self._early_signal = self._early_signal or signum


def _exit_status(ending: Ending) -> int:
    return ending.status if ending.status >= 0 else 128 - ending.status


def main() -> int:
    directory, token = sys.argv[1:]
    from pipeline.launchers.slurm import InJob

    return Supervisor(Path(directory), token, InJob()).run()


if __name__ == "__main__":
    sys.exit(main())
