"""The luigi task of a stage: its directory, fingerprint and command. `runner` runs it."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import luigi

from common.secrets import redact
from pipeline import launchers
from pipeline.luigi_adapters import exits, luigid_release
from pipeline.luigi_adapters.luigid_progress import reports
from pipeline.status import latest
from pipeline.store.shared import Kind, SharedStage, SharedStore
from pipeline.tasks.base import ChainTask
from pipeline.tasks.input_hashes import input_hashes
from pipeline.tasks.runner import Runner, UpstreamMissing
from stages.directory.manifest import MANIFEST, Identity, StartTime, directory_name, stage_label, why_incomplete
from stages.directory.options import StageOptions
from stages.directory.records import read_manifest

if TYPE_CHECKING:
    from stages.store.records import StageRecord


class Stage(ChainTask):
    """A task that owns one directory, `WORK/<stage>[-phase<N>]-<fingerprint[:10]>/`.

    It is complete when its manifest names its fingerprint and all listed outputs exist. `run` starts `command()`, which
    fills the directory, and links `WORK/latest/<stage>[-phase<N>]` to it.
    """

    #: Whether [cluster] launcher runs it; otherwise it runs on this machine.
    on_cluster: ClassVar[bool] = False
    #: Whether all [cluster] nnodes machines run its command together.
    on_all_nodes: ClassVar[bool] = False
    #: Whether its command resumes when restarted.
    resumes: ClassVar[bool] = False
    #: Whether its command imports torch, which takes seconds unless it is forked from a process that has it.
    imports_torch: ClassVar[bool] = False
    #: What it counts as in [store] push and pull; None: it stays on its machine.
    stored_as: ClassVar[Kind] = "models"

    # Overridden by subclasses.

    def options(self) -> StageOptions:
        """The command's options, from the settings; works before upstream stages are complete."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Write into the directory, whose lock is held, what the command reads there; upstream stages are complete."""

    def command(self) -> list[str]:
        """The command that fills the directory, as arguments for the Python interpreter; upstream stages must be
        complete."""
        return self.options().words(self.directory)

    @property
    def nodes(self) -> int:
        """Machines that run its command together."""
        return self.settings.cluster.nnodes if self.on_all_nodes else 1

    @property
    def is_on_cluster(self) -> bool:
        """Whether [cluster] launcher runs it."""
        return self.on_cluster

    @property
    def restarts(self) -> bool:
        """Whether its command is started again after a crash."""
        return self.resumes

    @property
    def hang_timeout_s(self) -> float | None:
        """Seconds without a sign of life after which the command is killed; None: never."""
        return self.settings.run.stage_hang_timeout_s or None

    @property
    def port_offset(self) -> int:
        """What is added to [cluster] master_port: the two phases and the MLP may run at the same time."""
        phase: int = getattr(self, "phase", 3)
        return phase - 1

    def finish(self, start: StartTime) -> None:
        """Called when the command has succeeded; only a hook, as commands in `stages` write their own manifest."""

    # Derived from these.

    @property
    def stage(self) -> str:
        """The name on disk: shard_dataset for ShardDataset."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", type(self).__name__).lower()

    @property
    def label(self) -> str:
        return stage_label(self.stage, getattr(self, "phase", None))

    @functools.cached_property
    def identity(self) -> Identity:
        """Identity of the result, including upstream fingerprints. Raises `UserError` for missing inputs."""
        return self.options().identity(input_hashes(self.settings.work_dir), self.upstream())

    def upstream(self) -> dict[str, str]:
        """Fingerprints of `ingredients`, by role."""
        return {role: task.identity.fingerprint for role, task in self.ingredients().items()}

    @property
    def directory(self) -> Path:
        return self.settings.work_dir / directory_name(self.label, self.identity.fingerprint)

    @property
    def max_steps(self) -> int | None:
        """Optimizer steps of a training; None for other stages, or if they are not known yet: they depend on the data
        or on the time per step."""
        return None

    def ends(self) -> list[Stage]:
        return [self]

    def requires(self) -> dict[str, Stage]:
        """The stages that must be complete first, by name."""
        return {}

    def ingredients(self) -> dict[str, Stage]:
        """The requirements whose outputs affect this stage's result."""
        return self.requires()

    @functools.cached_property
    def store(self) -> SharedStore | None:
        return SharedStore.of(self.settings.store)

    @property
    def shared(self) -> SharedStage:
        """The stage as the store knows it."""
        siblings = tuple(task.directory.name for task in self.requires().values())
        return SharedStage(
            self.label, self.identity.fingerprint, self.directory, self.stored_as, self.resumes, siblings
        )

    @functools.cached_property
    def stored(self) -> StageRecord | None:
        """What the store had of this stage when it was first asked. Raises `UserError`."""
        return self.store.find(self.shared) if self.store is not None else None

    def make_here(self) -> None:
        """From now on, the store has nothing of it: it cannot give what it had, or cannot be asked."""
        self.stored = None

    @functools.cached_property
    def stored_step(self) -> int:
        """The global step of the newest checkpoint that the store had of this unfinished training when it was first
        asked; -1: of none. Raises `UserError`."""
        return self.store.checkpoint_step(self.shared) if self.store is not None else -1

    def needs(self) -> dict[str, Stage]:
        """The stages that must be complete before this one can be made or fetched. Raises `UserError`."""
        every = self.requires()
        if self.stored is None:
            return every
        return {role: task for role, task in every.items() if task.directory.name in self.stored.beside}

    def deps(self) -> list[Stage]:
        """What luigi runs first."""
        with exits.while_scheduling():
            return list(self.needs().values())

    @contextlib.contextmanager
    def making(self, *, attached: bool) -> Iterator[bool]:
        """Surrounds the making of the stage, whose lock is held; yields whether it was fetched from the store instead.
        `attached`: a job of an earlier run is making it.

        Raises `UpstreamMissing` if it was to be fetched and cannot be.
        """
        if self.store is None:
            yield False
            return
        with self.store.making(self.shared, attached=attached) as was_fetched:
            missing = [] if was_fetched else [task for task in self.requires().values() if not task.complete()]
            if missing:
                raise UpstreamMissing(missing)
            yield was_fetched

    def output(self) -> luigi.LocalTarget:
        return luigi.LocalTarget(str(self.directory / MANIFEST))

    def why_incomplete(self) -> str | None:
        """Why the stage is incomplete; None if it is complete."""
        return why_incomplete(self.directory, self.identity.fingerprint)

    def complete(self) -> bool:
        with exits.while_scheduling():
            if self.why_incomplete() is not None:
                luigid_release.release(self, self.directory)
                return False
            if not (self.directory / MANIFEST).exists():
                return True  # a rung is complete without one
            if latest.is_older(self.label, self.directory):
                latest.link(self.label, self.directory)  # a run was killed after its manifest, before the link
            if self.store is not None:
                self.store.push_later(self.shared)
            return True

    def manifest(self) -> dict[str, Any]:
        """The manifest of this stage, which must be complete."""
        manifest = read_manifest(self.directory)
        assert manifest is not None, f"{self.label} is not complete"
        return manifest

    def counts(self) -> dict[str, Any]:
        """The counts of this stage, which must be complete."""
        counts: dict[str, Any] = self.manifest()["counts"]
        return counts

    def on_failure(self, exception: BaseException) -> str:
        """The traceback for luigi's mail and luigid, without secrets."""
        return redact(str(super().on_failure(exception)))  # type: ignore[no-untyped-call]

    def beside(self) -> contextlib.AbstractContextManager[None]:
        """Context manager around the stage's run."""
        return contextlib.nullcontext()

    def run(self) -> Iterator[Sequence[object]] | None:
        """Complete the stage. Raises `UserError`, which fails the task. If the store could not give what it had
        promised, returns what luigi is to run first, before it runs this again."""
        try:
            with exits.while_running(), contextlib.nullcontext() if self.settings.cluster.follows else reports(self):
                self.make()
        except UpstreamMissing as error:
            self.make_here()
            return (tasks for tasks in [error.tasks])
        return None

    def make(self) -> None:
        """`run` outside a luigi worker. Raises `Interrupted`, `LockHeld`, `UserError`."""
        cluster = self.settings.cluster
        runner = Runner(self, launchers.launcher(self.settings, on_cluster=self.is_on_cluster))
        if cluster.follows:
            runner.follow(cluster.node_rank, cluster.join_timeout_s)
        else:
            with self.beside():
                runner.run()
