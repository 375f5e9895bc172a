"""Run a stage's command until the stage is complete: lock, restarts, cluster job, record of failures."""

from __future__ import annotations

import contextlib
import functools
import re
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise

from common.console import log
from common.errors import Interrupted, LockHeld, UserError
from common.secrets import redact
from pipeline import launchers
from pipeline.console.select import console
from pipeline.launchers.base import Detached, Launcher, StageCommand
from pipeline.launchers.jobs import Job
from pipeline.launchers.local import NewFailures, await_node_0, runs_on_node_0
from pipeline.launchers.process import ProcessResult
from pipeline.launchers.restarts import RestartAfterHang, RestartPolicy, RestartWhileProgressing
from pipeline.status import latest
from pipeline.status.chain import StageTask
from stages.directory import attempts
from stages.directory.lock import JOB, LOCK, hold
from stages.directory.manifest import MANIFEST, AlreadyComplete, StartTime, claim


class CommandFailed(UserError):
    """A stage's command failed and is not restarted."""

    def __init__(self, message: str, error: str, status: int) -> None:
        """`error`, `status`: the command's own error message and exit status."""
        super().__init__(message)
        self.error, self.status = error, status


class UpstreamMissing(Exception):
    """Stages that must be complete before another can be made."""

    def __init__(self, tasks: Sequence[object]) -> None:
        super().__init__()
        self.tasks = tasks


class Runner:
    """One run of a stage."""

    def __init__(self, stage: StageTask, launcher: Launcher) -> None:
        self._stage, self._launcher = stage, launcher
        #: The last line of its command's output.
        self._last_line = ""
        #: Whether this process was asked to stop while the command was ending by itself.
        self._was_stopped = False
        self._restarts: RestartPolicy = (
            RestartWhileProgressing(stage.directory) if stage.restarts else RestartAfterHang()
        )

    def run(self) -> None:
        """Complete the stage in its directory.

        Raises `LockHeld`, `Interrupted`, or `UserError`; a `CommandFailed` is recorded for `attempts.last_failure`.
        """
        stage, began = self._stage, time.monotonic()
        with self._told(records=True), hold(stage.directory, knows_jobs=True) as lock:
            with contextlib.suppress(AlreadyComplete):
                self._fill(lock)
            is_complete = (stage.directory / MANIFEST).exists()
            if is_complete:
                latest.link(stage.label, stage.directory)
        if is_complete:
            console().complete(stage.label, time.monotonic() - began, self._result())
        else:
            log(f"{stage.label}: stopped as asked")
        self._heed_stop()

    def follow(self, node: int, timeout_s: float) -> None:
        """Run this node's share of the command, if any, and wait until node 0 has completed the stage.

        Raises `Interrupted`; `UserError`; `NodeMissing` without a sign of life from node 0 for `timeout_s` seconds.
        """
        stage = self._stage
        awaited = functools.partial(
            await_node_0, stage.label, stage.directory, timeout_s=timeout_s,
            has_failed=NewFailures(stage.directory),
        )  # fmt: skip
        with self._told(records=False):
            if stage.nodes > 1 and stage.stored is None:
                log(f"{stage.label}: node {node} of {stage.nodes}, in {stage.directory}")
                awaited(why_incomplete=self._why_not_started)
                if stage.why_incomplete() is not None:
                    with (stage.directory / LOCK).open("a", encoding="utf-8") as unlocked:
                        self._run_command(unlocked.fileno(), None)
            awaited(why_incomplete=stage.why_incomplete)
        log(f"{stage.label}: complete")
        self._heed_stop()

    @contextlib.contextmanager
    def _told(self, *, records: bool) -> Iterator[None]:
        """Tell the console how the block failed or was interrupted; `records`: and record a failure."""
        label = self._stage.label
        try:
            yield
        except Interrupted:
            console().interrupted(label)
            raise
        except (LockHeld, UpstreamMissing):
            raise
        except Exception as error:
            status, said = (error.status, error.error) if isinstance(error, CommandFailed) else (None, str(error))
            if records:
                attempts.record_failure(self._stage.directory, said)
            console().failed(label, status, redact(said))
            raise

    def _why_not_started(self) -> str | None:
        """Why this node has no share to run yet; None: node 0 runs the command, or has completed the stage: until then
        it may wait for another machine's lease for hours."""
        is_due = runs_on_node_0(self._stage.directory) or self._stage.why_incomplete() is None
        return None if is_due else "it has not started the command"

    def _heed_stop(self) -> None:
        """Raises `Interrupted` if this process was asked to stop when it was too late for the command."""
        if self._was_stopped:
            log(f"{self._stage.label}: interrupted; the same command continues after it")
            console().interrupted(self._stage.label)
            raise Interrupted

    def _result(self) -> str:
        """The last line of the command, without the directory at its end."""
        return re.sub(rf":? {re.escape(str(self._stage.directory))}\S*$", "", self._last_line)

    def _fill(self, lock: int) -> None:
        """Raises `AlreadyComplete`."""
        stage = self._stage
        job = self._find_job()
        if job is not None:
            start = StartTime.of(job.submitted)
        else:
            claim(stage.directory, stage.identity, alone=stage.nodes == 1)
            console().started(stage.label, stage.directory)
            start = StartTime.now()
        with stage.making(attached=job is not None) as was_fetched:
            if not was_fetched:
                if job is None:
                    stage.prepare()
                self._run_command(lock, job)
                stage.finish(start)

    def _find_job(self) -> Job | None:
        """The live job of an earlier run, if any. Raises `AlreadyComplete` if a finished one completed the stage."""
        stage = self._stage
        job = launchers.find_job(stage.directory)
        if job is None or self._is_alive(job):
            return job
        result = job.result()
        if result is not None and result.status == 0:
            with contextlib.suppress(UserError):
                stage.finish(StartTime.of(job.submitted))
        job.forget()
        if stage.why_incomplete() is None:
            raise AlreadyComplete
        return None

    def _is_alive(self, job: Job) -> bool:
        try:
            return job.is_alive()
        except UserError as error:
            raise UserError(
                f"{job} may still be running {self._stage.label}: {error}; if it is over, remove "
                f"{self._stage.directory / JOB}"
            ) from error

    def _run_command(self, lock: int, job: Job | None) -> None:
        """Run the command, or wait for the `job` that already runs it; restart it as the policy allows."""
        stage = self._stage
        while True:
            try:
                result = self._attach(job) if job is not None else self._launch(lock)
            except Detached as detached:
                log(f"{stage.label}: {detached} continues; the same command waits for it again, and "
                    f"`python -m pipeline cancel {stage.label}` ends it")  # fmt: skip
                raise
            # The job of a sweep's rung trains for some of the steps, in the same directory.
            was_part = job is not None and _stop(job.record.get("words", [])) not in (None, _stop(stage.command()))
            job = None
            if result.how == "interrupted":
                log(f"{stage.label}: interrupted; the same command resumes from here")
                raise Interrupted
            if result.status == 0 and was_part and stage.why_incomplete() is not None:
                continue
            if result.status == 0:
                self._last_line = result.last_line
                self._was_stopped = result.stopped_by is not None
                return
            error = f"no sign of life for {stage.hang_timeout_s} s" if result.hung else result.error
            if result.is_final or not self._restarts.may_restart(result):
                where = f"exit status {result.status}; log: {stage.directory / 'stage.log'}"
                raise CommandFailed(f"{stage.label} failed: {error} ({where})", error, result.status)
            log(f"{stage.label}: note: exit status {result.status} ({error.splitlines()[-1]}); starting again")

    def _launch(self, lock: int) -> ProcessResult:
        stage = self._stage
        return self._launcher.run(
            StageCommand(
                stage.label,
                stage.directory,
                lock,
                stage.identity.fingerprint,
                stage.command(),
                stage.nodes,
                stage.restarts,
                stage.hang_timeout_s,
                stage.imports_torch,
            )
        )

    def _attach(self, job: Job) -> ProcessResult:
        log(f"{self._stage.label}: {job} is running already; waiting for it")
        return job.wait(from_start=False)


def _stop(words: Sequence[str]) -> str | None:
    """The step after which a training's command is to stop; None: at its end."""
    return dict(pairwise(words)).get("--steps_this_run")
