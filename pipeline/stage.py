"""The Stage task: a directory, a fingerprint, a lock, a manifest, a log; subclasses say what runs and what decides."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import luigi
from luigi.retcodes import retcode

from pipeline import launchers, settings
from pipeline.launch import Ending
from pipeline.launchers.base import Detached, Work
from pipeline.launchers.jobs import Job
from pipeline.launchers.local import await_node_0
from pipeline.one_line import OneLine
from stages.lock import LOCK, hold
from stages.manifest import (
    FAILURE,
    MANIFEST,
    AlreadyComplete,
    Identity,
    claim,
    record_failure,
    why_incomplete,
)
from trainer.errors import EXIT_INTERRUPTED, DiskError, LockHeld, UserError
from trainer.files import failpoint, read_json, utc_now

LATEST = "latest"


class Leave(KeyboardInterrupt, SystemExit):
    """Leaves luigi at once with an exit code. Luigi hands a KeyboardInterrupt on, and makes a failed task with a
    traceback of everything else; being a SystemExit too, it ends the process with `code`."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """A `UserError` in the block, which is before anything has started, ends luigi with one line."""
    try:
        yield
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise Leave(retcode().scheduling_error) from None


class Stage(luigi.Task):
    """A task that owns one directory, `WORK/<stage>[-phase<N>]-<fingerprint[:10]>/`.

    It is complete when the manifest there names its fingerprint and the outputs listed are there. `run` claims the
    directory, starts `command()` as a process that fills it, and links `WORK/latest/<stage>[-phase<N>]` to it.
    """

    #: Raised when the same settings would make something else.
    format_version: ClassVar[int] = 1
    #: Whether it runs where [cluster] launcher says; all else is made on this machine.
    on_cluster: ClassVar[bool] = False
    #: Whether its command, started again, goes on from where it was.
    resumes: ClassVar[bool] = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]
        with refusals():
            self.settings = settings.load()

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
        return 1

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

    def requires(self) -> dict[str, Stage]:
        """What has to be complete first, by name."""
        return {}

    def ingredients(self) -> dict[str, Stage]:
        """Those whose outputs decide this one's."""
        return self.requires()

    def output(self) -> luigi.LocalTarget:
        return luigi.LocalTarget(str(self.directory / MANIFEST))

    def complete(self) -> bool:
        with refusals():
            complete = why_incomplete(self.directory, self.identity.fingerprint) is None
            if complete and self._is_newer_than_link():
                self._link_latest()  # a run was killed between its manifest and the link
            return complete

    def manifest(self) -> dict[str, Any]:
        """The manifest of this stage, which is complete."""
        manifest = read_json(self.directory / MANIFEST)
        assert manifest is not None, f"{self.label} is not complete"
        return manifest

    def counts(self) -> dict[str, Any]:
        """What this stage, which is complete, counted."""
        counts: dict[str, Any] = self.manifest()["counts"]
        return counts

    def run(self) -> None:
        """Fill the directory. Raises `UserError` (the task fails), or `Leave` when somebody else is at it."""
        if self.settings.cluster.follows:
            self._follow()
            return
        try:
            with hold(self.directory, knows_jobs=True) as lock:
                with contextlib.suppress(AlreadyComplete):
                    job = launchers.find_job(self.directory)
                    self._begin(job)
                    if job is None or not self._was_ended_by(job):
                        self._run_command(lock, job)
                        self.finish()
                self._link_latest()
        except LockHeld as error:
            say(f"error: {error}")
            raise Leave(retcode().already_running) from None
        except Exception as error:
            if not (self.directory / FAILURE).exists():
                record_failure(self.directory, str(error))
            raise
        say(f"{self.label}: complete")

    def _begin(self, job: Job | None) -> None:
        """Claim the directory, unless a job that an earlier run has submitted is at work in it."""
        if job is None:
            claim(self.directory, self.identity)
            say(f"{self.label}: started in {self.directory}")
            self.started, self.clock = utc_now(), time.monotonic()
        else:
            self.started, self.clock = job.submitted, time.monotonic() - job.seconds

    def _follow(self) -> None:
        """This machine is not the first: do its share, and wait until the first has finished."""
        if self.nodes > 1:
            say(f"{self.label}: node {self.settings.cluster.node_rank} of {self.nodes}, in {self.directory}")
            self.directory.mkdir(parents=True, exist_ok=True)
            with (self.directory / LOCK).open("a") as nothing:
                self._run_command(nothing.fileno(), None)
        await_node_0(
            self.label,
            self.directory,
            lambda: why_incomplete(self.directory, self.identity.fingerprint),
            self.settings.cluster.join_timeout_s,
            say,
        )

    def hang_timeout_s(self) -> float | None:
        """Seconds of silence after which the command is killed; None: never."""
        return None

    def may_restart(self, ending: Ending) -> bool:
        """Whether a command that ended so is to be started again."""
        return False

    def _was_ended_by(self, job: Job) -> bool:
        """Whether a job that nobody waited for has completed this stage; if not, and it is over, it is forgotten."""
        if job.is_alive():
            return False
        ending = job.ending()
        if ending is not None and ending.status == 0:
            with contextlib.suppress(UserError):
                self.finish()
        job.forget()
        return why_incomplete(self.directory, self.identity.fingerprint) is None

    def _run_command(self, lock: int, job: Job | None) -> None:
        """Run the command, again and again as long as that may help; or wait for the job that runs it already."""
        while True:
            try:
                ending = self._attach(job) if job is not None else self._launch(lock)
            except Detached as detached:
                say(f"{self.label}: {detached} goes on; the same command waits for it again, and "
                    f"`python -m pipeline cancel {self.label}` ends it")  # fmt: skip
                raise Leave(EXIT_INTERRUPTED) from None
            job = None
            if ending.interrupted or ending.status == EXIT_INTERRUPTED:
                say(f"{self.label}: interrupted; the same command goes on from here")
                raise Leave(EXIT_INTERRUPTED)
            if ending.status == 0:
                return
            error = f"it did nothing for {self.hang_timeout_s()} s" if ending.hung else ending.error
            if ending.is_final or not self.may_restart(ending):
                if not self.settings.cluster.follows:
                    record_failure(self.directory, error)
                log = self.directory / "stage.log"
                raise UserError(f"{self.label} failed: {error} (exit status {ending.status}; log: {log})")
            say(f"{self.label}: exit status {ending.status} ({error.splitlines()[-1]}); starting again")

    def _launch(self, lock: int) -> Ending:
        work = Work(
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

    def _attach(self, job: Job) -> Ending:
        say(f"{self.label}: {job} is at work already; waiting for it")
        return job.wait(from_start=False)

    def _is_newer_than_link(self) -> bool:
        try:
            linked = (self.settings.work_dir / LATEST / self.label / MANIFEST).stat().st_mtime_ns
        except FileNotFoundError:
            return True
        return (self.directory / MANIFEST).stat().st_mtime_ns > linked

    def _link_latest(self) -> None:
        latest = self.settings.work_dir / LATEST
        link = latest / self.label
        temporary = latest / f".{self.label}.{os.getpid()}"
        try:
            latest.mkdir(exist_ok=True)
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(Path("..") / self.directory.name)
            failpoint(f"link-before:{self.label}")
            temporary.replace(link)
            failpoint(f"link-after:{self.label}")
        except OSError as error:
            raise DiskError.of(error, link) from error


def say(line: str) -> None:
    """A line for the person at the console."""
    print(line, file=sys.stderr, flush=True)


logging.getLogger("luigi-interface").addFilter(OneLine())
