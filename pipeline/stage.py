"""The Stage task: a directory, a fingerprint, a lock, a manifest, a log; subclasses say what runs and what decides."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import luigi
from luigi.retcodes import retcode

from pipeline import launch, settings
from pipeline.plain_sight import reports
from stages import attempts
from stages.lock import hold
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
from trainer.files import failpoint, read_json, replace_json, sha256_of, utc_now

LATEST = "latest"


def option_words(options: Mapping[str, Any]) -> list[str]:
    """`--name=value` for each, as the stages' commands take them; what is empty is left out."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if value != ""]


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

    def beside(self) -> contextlib.AbstractContextManager[None]:
        """What goes on while the stage runs."""
        return contextlib.nullcontext()

    def run(self) -> None:
        """Fill the directory. Raises `UserError` (the task fails), or `Leave` when somebody else is at it."""
        with self.beside():
            self._fill()
        say(f"{self.label}: complete")

    def _fill(self) -> None:
        try:
            with hold(self.directory) as lock:
                with contextlib.suppress(AlreadyComplete):
                    claim(self.directory, self.identity)
                    say(f"{self.label}: started in {self.directory}")
                    self.started, self.clock = utc_now(), time.monotonic()
                    with reports(self):
                        self._run_command(lock)
                    self.finish()
                self._link_latest()
        except LockHeld as error:
            say(f"error: {error}")
            raise Leave(retcode().already_running) from None
        except Exception as error:
            if not (self.directory / FAILURE).exists():
                record_failure(self.directory, str(error))
            raise

    def hang_timeout_s(self) -> float | None:
        """Seconds of silence after which the command is killed; None: never."""
        return None

    def may_restart(self, ending: launch.Ending) -> bool:
        """Whether a command that ended so is to be started again."""
        return False

    def _run_command(self, lock: int) -> None:
        while True:
            with attempts.recording(self.directory) as record:
                ending = launch.run(
                    self.command(),
                    directory=self.directory,
                    fingerprint=self.identity.fingerprint,
                    keep_open=(lock,),
                    hang_timeout_s=self.hang_timeout_s(),
                )
                record(_how(ending), ending.status, ending.error)
            if _how(ending) == "interrupted":
                say(f"{self.label}: interrupted; the same command goes on from here")
                raise Leave(EXIT_INTERRUPTED)
            if ending.status == 0:
                return
            error = f"it did nothing for {self.hang_timeout_s()} s" if ending.hung else ending.error
            if not self.may_restart(ending):
                record_failure(self.directory, error)
                log = self.directory / "stage.log"
                raise UserError(f"{self.label} failed: {error} (exit status {ending.status}; log: {log})")
            say(f"{self.label}: exit status {ending.status} ({error.splitlines()[-1]}); starting again")

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


def _how(ending: launch.Ending) -> attempts.How:
    if ending.interrupted or ending.status == EXIT_INTERRUPTED:
        return "interrupted"
    if ending.status == 0:
        return "complete"
    return "hung" if ending.hung else "failed"


def say(line: str) -> None:
    """A line for the person at the console."""
    print(line, file=sys.stderr, flush=True)


def file_identity(work_dir: Path, path: Path) -> str:
    """The sha256 of an outside file, remembered in WORK/inputs.json for as long as its size and times stay.

    Raises `UserError` if there is no such file.
    """
    try:
        stat = path.stat()
        key, seen = str(path.absolute()), [stat.st_size, stat.st_mtime_ns, stat.st_ino]
        memory_path = work_dir / "inputs.json"
        memory = read_json(memory_path) or {}
        if memory.get(key, {}).get("seen") != seen:
            memory[key] = {"seen": seen, "sha256": sha256_of(path)}
            _remember(memory_path, memory)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check the path in luigi.cfg") from error
    digest: str = memory[key]["sha256"]
    return digest


def _remember(path: Path, memory: dict[str, Any]) -> None:
    """Only a memory: several processes may write it, and where it cannot be written files are hashed again."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_json(path, memory)


class _OneLine(logging.Filter):
    """Makes one line of luigi's traceback, beside a message or in it, when what failed is a `UserError`."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = (record.exc_info or sys.exc_info())[1]
        if isinstance(error, UserError) and (record.exc_info or "Traceback" in record.getMessage()):
            record.msg, record.args, record.exc_info, record.exc_text = str(error), (), None, None
            record.levelno, record.levelname = logging.ERROR, "ERROR"
        return True


logging.getLogger("luigi-interface").addFilter(_OneLine())
