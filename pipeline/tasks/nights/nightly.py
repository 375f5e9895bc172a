"""The whole chain every night, with that night's text or archive, in its own work directory."""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from pathlib import Path
from typing import Any

import luigi
from luigi.retcodes import retcode
from luigi.task import MixinNaiveBulkComplete

from common.console import log
from common.errors import EXIT_INTERRUPTED, DiskError, Interrupted, LockHeld, UserError
from common.files import utc_now
from pipeline.console.select import console
from pipeline.launchers import process
from pipeline.luigi_adapters import exits, luigid_release
from pipeline.tasks.base import PipelineTask
from pipeline.tasks.nights import directories, notify, records, states
from stages.directory.attempts import ATTEMPTS, last_failure
from stages.directory.lock import hold

#: Lines from the end of a night's log in the mail about its failure.
_LAST_LINES = 30


class Nightly(MixinNaiveBulkComplete, PipelineTask):
    """The chain up to the evaluated model, once per date, one at a time; the last [nights] keep nights are kept."""

    date: luigi.DateParameter = luigi.DateParameter(description="the night, as 2026-11-21")
    #: One at a time within a luigi process; across processes, which may use different schedulers, the lock ensures it.
    resources = {f"nightly-{os.getpid()}": 1}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.nights = directories.NightDirs(self.settings)

    def complete(self) -> bool:
        complete = self.nights.is_complete(self.date)
        if not complete:
            luigid_release.release(self, self.nights.path)
        return complete

    def requires(self) -> list[luigi.Task]:
        """Check the night's input files, and whether it can continue the last one; requires no task.

        Raises `UserError`: luigi exits with `scheduling_error`, and RangeDaily still runs its other nights.
        """
        if states.state_of(self.nights.path, self.date).status == "running":
            return []  # by another process, which `run` finds
        try:
            self.nights.require_startable(self.date)
        except UserError:
            exits.disable_keep_alive()
            raise
        return []

    def run(self) -> None:
        """Run the night's chain. Raises `UserError` if it failed."""
        with exits.while_running(), contextlib.ExitStack() as stack:
            try:
                lock = stack.enter_context(hold(self.nights.path))
            except LockHeld:
                self._tell_held()
                raise
            if self.complete():
                return
            try:
                self.nights.require_startable(self.date)
                self._tell_killed()
                self._run_chain(lock)
            except UserError:
                exits.disable_keep_alive()
                raise

    def _run_chain(self, lock: int) -> None:
        """Raises `Interrupted`; `LockHeld` if another process is working on a stage; `UserError`."""
        directory, clock, since, started = self.nights.directory(self.date), time.monotonic(), time.time(), utc_now()
        before = states.recorded(self.nights.path, self.date)
        states.write(self.nights.path, self.date, states.now("running"))
        environment = self.nights.prepare(self.date)
        log(f"night {self.date}: started in {directory}")
        result = process.run(
            ["-m", "pipeline.tasks.nights.one_night"],
            directory=directory,
            fingerprint="",
            keep_open=(lock,),
            showing=console().lines(),
            start=process.LaunchSpec(environment=environment),
        )
        if result.interrupted or result.status == EXIT_INTERRUPTED:
            log(f"night {self.date}: interrupted; the same command resumes from here")
            self._note_ended("interrupted", "the same command resumes")
            raise Interrupted
        reason = result.last_error or result.error.splitlines()[-1]
        if result.status == retcode().already_running:
            line = f"night {self.date} is held up: {reason}"
            self._tell_held_up(line, before)
            raise LockHeld(line)
        if result.status:
            reason = self._last_failure(directory, since) or reason
            log_path = directory / "stage.log"
            if result.status == retcode().not_run:
                reason = "a stage was made to wait: one that failed too often waits [scheduler] disable_persist seconds"
            raise UserError(f"night {self.date} failed: {reason} (exit status {result.status}; log: {log_path})")
        results = records.results(directory)
        gate = records.judged(self.nights.path, self.date, results, self.settings.nights.gate_tolerance)
        facts = {
            "date": str(self.date), "started": started, "seconds": round(time.monotonic() - clock, 1), **results,
            "gate": gate,
        }  # fmt: skip
        self.nights.record(self.date, facts)
        states.forget(self.nights.path, self.date)
        self._tell_complete(facts)
        try:
            self.nights.prune(self.date)
            records.write_trend(self.nights.path)
        except DiskError as error:
            log(f"note: after night {self.date}: {error}")

    def _last_failure(self, directory: Path, since: float) -> str | None:
        """The error of the stage that failed last; an earlier one may have been retried. `since`: in seconds since
        1970."""
        found = [failure for path in directory.glob(f"*/{ATTEMPTS}") if (failure := last_failure(path.parent))]
        newest = max(found, key=lambda failure: failure.at, default=None)
        return newest.line if newest is not None and newest.at >= since else None

    def _tell_complete(self, facts: dict[str, Any]) -> None:
        """Report the results and whether the gate accepted them."""
        accuracy, gate = facts["evaluation"].get("masked_lm_accuracy"), facts["gate"]
        measured = "nothing was held out" if accuracy is None else f"masked-LM accuracy {accuracy:.1%}"
        line = f"night {self.date} is complete: {measured}, model {facts['model']}"
        if records.is_accepted(facts):
            if gate is None and self.settings.nights.gate_tolerance is not None:
                log(
                    f"note: night {self.date}: no earlier night has a loss on the same held-out text: accepted as it is"
                )
            log(line)
            self.tell_all(self.date, "completion", "complete", line)
            return
        line = f"night {self.date} is rejected: {records.rejection(gate)}; {directories.LATEST} stays; it is kept"
        log(line)
        self.tell_all(self.date, "rejection", "rejected", line)

    def on_failure(self, exception: BaseException) -> str:
        """The error and the end of the log, for luigi's mail and luigid."""
        log_path = self.nights.directory(self.date) / "stage.log"
        text = log_path.read_text(encoding="utf-8", errors="replace") if log_path.exists() else ""
        last = text.splitlines()[-_LAST_LINES:]
        return "\n".join([str(exception), "", *last])

    def tell_all(self, date: datetime.date, event: str, status: str, line: str) -> None:
        notify.by_all(self.settings, f"Luigi: Nightly {date} is {status}", line, event=event, status=status, date=date)

    def ended(self, error: BaseException, status: states.Status) -> None:
        """Record the error and call the webhook; luigi itself sends the mail."""
        self._note_ended(status, str(error))
        notify.by_webhook_of(self.settings, event="failure", status=status, date=self.date, line=str(error))

    def _note_ended(self, status: states.Status, line: str) -> None:
        states.write_ended(self.nights.path, self.date, status, line)

    def _tell_killed(self) -> None:
        """Report nights that were killed. The lock is held."""
        for date, state in list(states.killed(self.nights.path)):
            who = f"process {state.pid} on {state.host}, started {state.started}"
            line = f"night {date} was killed before it could say why ({who})"
            log(f"note: {line}")
            states.write_ended(self.nights.path, date, "killed", "")
            self.tell_all(date, "failure", "killed", line)

    def _tell_held(self) -> None:
        """Report that another night blocks this one, once per holder; a second start of this night is not reported."""
        other, who = states.running(self.nights.path)
        line = (
            f"night {self.date} was not started: {f'night {other}' if other else 'another one'} is still running, {who}"
        )
        if other != self.date:
            self._tell_held_up(line, states.recorded(self.nights.path, self.date))

    def _tell_held_up(self, line: str, before: states.NightState | None) -> None:
        """`before`: the state that the night's last start left, which may have told the same."""
        self._note_ended("held", line)
        if before is None or before.line != line:
            self.tell_all(self.date, "failure", "held", line)


@Nightly.event_handler(luigi.Event.FAILURE)  # type: ignore[no-untyped-call, untyped-decorator]
def _tell_failed(night: Nightly, error: BaseException) -> None:
    night.ended(error, "failed")


@Nightly.event_handler(luigi.Event.BROKEN_TASK)  # type: ignore[no-untyped-call, untyped-decorator]
def _tell_refused(night: Nightly, error: BaseException) -> None:
    night.ended(error, "refused")
