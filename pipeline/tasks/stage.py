"""The luigi task of a stage: its directory, fingerprint and command. `runner` runs it."""

from __future__ import annotations

import contextlib
import functools
import re
from pathlib import Path
from typing import Any, ClassVar

import luigi

from common.secrets import redact
from pipeline import launchers
from pipeline.luigi_adapters import exits, luigid_release
from pipeline.luigi_adapters.luigid_progress import reports
from pipeline.status import latest
from pipeline.tasks.base import PipelineTask
from pipeline.tasks.input_hashes import input_hashes
from pipeline.tasks.runner import Runner
from stages.directory.manifest import MANIFEST, Identity, StartTime, why_incomplete
from stages.directory.options import StageOptions
from stages.directory.records import read_manifest


class Stage(PipelineTask):
    """A task that owns one directory, `WORK/<stage>[-phase<N>]-<fingerprint[:10]>/`.

    It is complete when the manifest there names its fingerprint and all outputs listed exist. `run` starts `command()`,
    which fills the directory, and links `WORK/latest/<stage>[-phase<N>]` to it.
    """

    #: Whether [cluster] launcher applies to it; else it runs on this machine.
    on_cluster: ClassVar[bool] = False
    #: Whether all [cluster] nnodes machines run its command together.
    on_all_nodes: ClassVar[bool] = False
    #: Whether its command resumes when it is started again.
    resumes: ClassVar[bool] = False

    # Overridden by subclasses.

    def options(self) -> StageOptions:
        """The options of its command, from the settings. Upstream stages need not be complete."""
        raise NotImplementedError

    def command(self) -> list[str]:
        """What fills the directory: arguments after the Python interpreter. Upstream stages are complete."""
        return self.options().words(self.directory)

    @property
    def nodes(self) -> int:
        """Machines that run its command together."""
        return self.settings.cluster.nnodes if self.on_all_nodes else 1

    @property
    def hang_timeout_s(self) -> float | None:
        """Seconds without a sign of life after which the command is killed; None: never."""
        return self.settings.run.stage_hang_timeout_s or None

    def finish(self, start: StartTime) -> None:
        """Called when the command has succeeded. Commands of `stages` have written their manifest themselves."""

    # Derived from these.

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
        """What identifies the result, upstream fingerprints included. Raises `UserError` for missing inputs."""
        return self.options().identity(input_hashes(self.settings.work_dir), self.upstream())

    def upstream(self) -> dict[str, str]:
        """The fingerprints of the stages whose outputs decide this one's, by role."""
        return {role: task.identity.fingerprint for role, task in self.ingredients().items()}

    @property
    def directory(self) -> Path:
        return self.settings.work_dir / f"{self.label}-{self.identity.fingerprint[:10]}"

    @property
    def max_steps(self) -> int | None:
        """Optimizer steps of a training; None for other stages, or where the data decides."""
        return None

    def ends(self) -> list[Stage]:
        return [self]

    def requires(self) -> dict[str, Stage]:
        """The stages that must be complete first, by name."""
        return {}

    def ingredients(self) -> dict[str, Stage]:
        """The requirements whose outputs decide this stage's."""
        return self.requires()

    def output(self) -> luigi.LocalTarget:
        return luigi.LocalTarget(str(self.directory / MANIFEST))

    def why_incomplete(self) -> str | None:
        """Why the directory does not hold this stage, complete; None: it does."""
        return why_incomplete(self.directory, self.identity.fingerprint)

    def complete(self) -> bool:
        with exits.while_scheduling():
            if self.why_incomplete() is not None:
                luigid_release.release(self, self.directory)
                return False
            if latest.is_older(self.label, self.directory):
                latest.link(self.label, self.directory)  # a run was killed between its manifest and the link
            return True

    def manifest(self) -> dict[str, Any]:
        """The manifest of this stage, which is complete."""
        manifest = read_manifest(self.directory)
        assert manifest is not None, f"{self.label} is not complete"
        return manifest

    def counts(self) -> dict[str, Any]:
        """The counts of this stage, which is complete."""
        counts: dict[str, Any] = self.manifest()["counts"]
        return counts

    def on_failure(self, exception: BaseException) -> str:
        """The traceback for luigi's mail and luigid, without secrets."""
        return redact(str(super().on_failure(exception)))  # type: ignore[no-untyped-call]

    def beside(self) -> contextlib.AbstractContextManager[None]:
        """A context in which the stage runs."""
        return contextlib.nullcontext()

    def run(self) -> None:
        """Complete the stage. Raises `UserError`: the task fails."""
        cluster = self.settings.cluster
        with exits.while_running():
            runner = Runner(self, launchers.launcher(self.settings, on_cluster=self.on_cluster))
            if cluster.follows:
                runner.follow(cluster.node_rank, cluster.join_timeout_s)
            else:
                with self.beside(), reports(self):
                    runner.run()
