"""The Stage task: a directory, a fingerprint, a lock, a manifest, a log; subclasses say what runs and what decides."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import luigi
from luigi.retcodes import retcode

from common.console import log
from common.errors import EXIT_INTERRUPTED, LockHeld, UserError
from common.files import utc_now
from common.secrets import Secret, redact
from pipeline import launchers
from pipeline.launchers.base import Detached, StageCommand
from pipeline.launchers.jobs import Job
from pipeline.launchers.local import await_node_0, failure_mark
from pipeline.launchers.process import ProcessResult
from pipeline.status import latest
from pipeline.tasks.base import PipelineTask, refusals
from pipeline.tasks.log_filter import OneLine
from pipeline.tasks.luigi_workers import Leave, leaving
from pipeline.tasks.luigid_progress import reports
from stages.directory.lock import LOCK, hold
from stages.directory.manifest import (
    FAILURE,
    MANIFEST,
    AlreadyComplete,
    Identity,
    claim,
    record_failure,
    why_incomplete,
)
from stages.directory.records import read_manifest


def option_words(options: Mapping[str, Any]) -> list[str]:
    """`--name=value` for each, as the stages' commands take them; what is empty is left out."""
    words: list[str] = []
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, Secret) and value:  # a word of its own, which its launcher hides
            words += [option, value]
        elif value != "":
            words.append(f"{option}={value}")
    return words


class Stage(PipelineTask):
    """A task that owns one directory, `WORK/<stage>[-phase<N>]-<fingerprint[:10]>/`.

    It is complete when the manifest there names its fingerprint and the outputs listed are there. `run` claims the
    directory, starts `command()` as a process that fills it, and links `WORK/latest/<stage>[-phase<N>]` to it.
    """

    #: Raised when the same settings would make something else.
    format_version: ClassVar[int] = 1
    #: Whether it runs where [cluster] launcher says; all else is made on this machine.
    on_cluster: ClassVar[bool] = False
    #: Whether all [cluster] nnodes machines run its command together.
    on_all_nodes: ClassVar[bool] = False
    #: Whether its command, started again, goes on from where it was.
    resumes: ClassVar[bool] = False
    #: How often its command has hung.
    _hangs = 0

    # What subclasses say.

    def parameters(self) -> dict[str, Any]:
        """The settings that decide what comes out."""
        return {}

    def inputs(self) -> dict[str, Any]:
        """The identity of what comes from outside."""
        return {}

    def command(self) -> list[str]:
        """What fills the directory: arguments after the Python interpreter. Upstream stages are complete."""
        raise NotImplementedError

    @property
    def nodes(self) -> int:
        """Machines that run its command together."""
        return self.settings.cluster.nnodes if self.on_all_nodes else 1

    def finish(self) -> None:
        """Called when the command has ended well; commands of `stages` have written their manifest by then."""

    # What follows from it.

    @property
    def stage(self) -> str:
        """The name on disk: ShardDataset is shard_dataset."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", type(self).__name__).lower()

    @property
    def label(self) -> str:
        phase = getattr(self, "phase", None)
        return self.stage if phase is None else f"{self.stage}-phase{phase}"

    @functools.cached_property
    def identity(self) -> Identity:
        """All that decides what comes out, upstream fingerprints included. Raises `UserError` for missing inputs."""
        upstream = self.ingredients()
        return Identity(
            stage=self.stage,
            format_version=self.format_version,
            phase=getattr(self, "phase", None),
            parameters=self.parameters(),
            inputs=self.inputs(),
            upstream={name: task.identity.fingerprint for name, task in upstream.items()},
        )

    @property
    def directory(self) -> Path:
        return self.settings.work_dir / f"{self.label}-{self.identity.fingerprint[:10]}"

    @property
    def max_steps(self) -> int | None:
        """Optimizer steps of a training; None for any other stage, or where only the data tells."""
        return None

    def ends(self) -> list[Stage]:
        return [self]

    def requires(self) -> dict[str, Stage]:
        """What has to be complete first, by name."""
        return {}

    def ingredients(self) -> dict[str, Stage]:
        """Those whose outputs decide this one's."""
        return self.requires()

    def output(self) -> luigi.LocalTarget:
        return luigi.LocalTarget(str(self.directory / MANIFEST))

    def why_incomplete(self) -> str | None:
        """Why what is in the directory is not this stage, complete; None: it is."""
        return why_incomplete(self.directory, self.identity.fingerprint)

    def complete(self) -> bool:
        with refusals():
            complete = self.why_incomplete() is None
            if complete and latest.is_older(self.settings.work_dir, self.label, self.directory):
                latest.link(
                    self.settings.work_dir, self.label, self.directory
                )  # a run was killed between its manifest and the link
            return complete

    def manifest(self) -> dict[str, Any]:
        """The manifest of this stage, which is complete."""
        manifest = read_manifest(self.directory)
        assert manifest is not None, f"{self.label} is not complete"
        return manifest

    def counts(self) -> dict[str, Any]:
        """What this stage, which is complete, counted."""
        counts: dict[str, Any] = self.manifest()["counts"]
        return counts

    def on_failure(self, exception: BaseException) -> str:
        """What luigi's mail and luigid say: the traceback, without secrets."""
        return redact(str(super().on_failure(exception)))  # type: ignore[no-untyped-call]

    def beside(self) -> contextlib.AbstractContextManager[None]:
        """What goes on while the stage runs."""
        return contextlib.nullcontext()

    def run(self) -> None:
        """Fill the directory. Raises `UserError` (the task fails), or `Leave` when somebody else is at it."""
        follows = self.settings.cluster.follows
        with leaving():
            with contextlib.nullcontext() if follows else self.beside():
                if follows:
                    self._follow()
                else:
                    self._fill()
            log(f"{self.label}: complete")

    def _fill(self) -> None:
        try:
            with hold(self.directory, knows_jobs=True) as lock:
                with contextlib.suppress(AlreadyComplete):
                    job = self._job_at_work()
                    if job is None:
                        claim(self.directory, self.identity)
                        log(f"{self.label}: started in {self.directory}")
                        self.started, self.clock = utc_now(), time.monotonic()
                    with reports(self):
                        self._run_command(lock, job)
                    self.finish()
                latest.link(self.settings.work_dir, self.label, self.directory)
        except LockHeld as error:
            log(f"error: {error}")
            raise Leave(retcode().already_running) from None
        except Exception as error:
            if not (self.directory / FAILURE).exists():
                record_failure(self.directory, str(error))
            raise

    def _job_at_work(self) -> Job | None:
        """The job that an earlier run has submitted, if it is not over. Raises `AlreadyComplete` if it is, and has
        completed this stage."""
        job = launchers.find_job(self.directory)
        if job is None:
            return None
        self.started, self.clock = job.submitted, time.monotonic() - job.seconds
        if job.is_alive():
            return job
        result = job.result()
        if result is not None and result.status == 0:
            with contextlib.suppress(UserError):
                self.finish()
        job.forget()
        if self.why_incomplete() is None:
            raise AlreadyComplete
        return None

    def _follow(self) -> None:
        """This machine is not the first: do its share, and wait until the first has finished."""
        failed_before = failure_mark(self.directory)
        if self.nodes > 1:
            log(f"{self.label}: node {self.settings.cluster.node_rank} of {self.nodes}, in {self.directory}")
            self.directory.mkdir(parents=True, exist_ok=True)
            with (self.directory / LOCK).open("a", encoding="utf-8") as nothing:
                self._run_command(nothing.fileno(), None)
        await_node_0(
            self.label,
            self.directory,
            self.why_incomplete,
            self.settings.cluster.join_timeout_s,
            failed_before=failed_before,
        )

    def hang_timeout_s(self) -> float | None:
        """Seconds without a sign of life after which the command is killed; None: never."""
        return self.settings.run.stage_hang_timeout_s or None

    def may_restart(self, result: ProcessResult) -> bool:
        """Whether a command that ended so is to be started again: after a hang, once."""
        self._hangs += result.hung
        return result.hung and self._hangs == 1

    def _run_command(self, lock: int, job: Job | None) -> None:
        """Run the command, again and again as long as that may help; or wait for the job that runs it already."""
        while True:
            try:
                result = self._attach(job) if job is not None else self._launch(lock)
            except Detached as detached:
                log(f"{self.label}: {detached} goes on; the same command waits for it again, and "
                    f"`python -m pipeline cancel {self.label}` ends it")  # fmt: skip
                raise Leave(EXIT_INTERRUPTED) from None
            job = None
            if result.how == "interrupted":
                log(f"{self.label}: interrupted; the same command goes on from here")
                raise Leave(EXIT_INTERRUPTED)
            if result.status == 0:
                return
            error = f"it did nothing for {self.hang_timeout_s()} s" if result.hung else result.error
            if result.is_final or not self.may_restart(result):
                if not self.settings.cluster.follows:
                    record_failure(self.directory, error)
                raise UserError(
                    f"{self.label} failed: {error} (exit status {result.status}; log: {self.directory / 'stage.log'})"
                )
            log(f"{self.label}: exit status {result.status} ({error.splitlines()[-1]}); starting again")

    def _launch(self, lock: int) -> ProcessResult:
        work = StageCommand(
            self.label,
            self.directory,
            lock,
            self.identity.fingerprint,
            self.command(),
            self.nodes,
            self.resumes,
            self.hang_timeout_s(),
        )
        return launchers.launcher(self.settings, on_cluster=self.on_cluster).run(work)

    def _attach(self, job: Job) -> ProcessResult:
        log(f"{self.label}: {job} is at work already; waiting for it")
        return job.wait(from_start=False)


logging.getLogger("luigi-interface").addFilter(OneLine())
