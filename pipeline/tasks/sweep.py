"""Sweeps: trials with overlays of the settings, which share all stages that do not depend on what differs."""

from __future__ import annotations

import functools
import hashlib
import math
import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import luigi

from common.console import log
from common.errors import LockHeld, UserError
from common.files import METRICS, disk_errors, read_json, write_json
from pipeline.luigi_adapters import exits
from pipeline.settings import sweep_file
from pipeline.settings.sweep_file import Halving, SweepFile
from pipeline.status.chain import chain, is_complete, would_run
from pipeline.status.comparison import of_goals
from pipeline.tasks.base import ChainTask, PipelineTask
from pipeline.tasks.bert import Evaluate, MergeShards, Pretrain
from pipeline.tasks.rungs import EvaluatePhase1, PretrainToRung
from pipeline.tasks.runner import UpstreamMissing
from pipeline.tasks.stage import Stage
from stages.view import comparison
from stages.view.curves import MetricsFile
from stages.view.text import number

#: This run of luigi; its worker processes inherit it. A trial that has failed in it is not tried again.
_RUN = uuid.uuid4().hex
#: Seconds between attempts to start a stage that another trial is making.
_WAIT_S = 1.0
#: In the work directory: a folder for each sweep, with its file's place, the fingerprints of its stages and its trials'
#: failures.
SWEEPS = "sweeps"
RECORD = "sweep.json"
_read = functools.cache(sweep_file.read)


class Trial(ChainTask):
    """A trial of a sweep, up to a rung or to its end. Luigi sees one task: its stages run in order, and a failure is
    recorded, so that the other trials and the next rung continue."""

    sweep: luigi.Parameter[str] = luigi.Parameter(description="the sweep's name")
    trial: luigi.Parameter[str] = luigi.Parameter(description="the trial's name")
    goal: luigi.Parameter[str] = luigi.Parameter(description="BertPhase1 or BertPhase2")
    rung: luigi.OptionalIntParameter = luigi.OptionalIntParameter(default=None, description="the step to stop at")

    def ends(self) -> list[Stage]:
        """The stages that no other stage of the trial depends on."""
        if self.rung is not None or self.goal == "BertPhase1":
            return [self.sibling(EvaluatePhase1, stop_step=self.rung)]
        return [self.sibling(MergeShards), self.sibling(Evaluate)]

    def reached(self) -> bool:
        """Whether all stages are complete; training may have passed the rung in another sweep, without evaluation."""
        if all(map(is_complete, self.ends())):
            return True
        if self.rung is None:
            return False
        pretrain = self.sibling(PretrainToRung, stop_step=self.rung)
        return pretrain.why_incomplete() is None and not pretrain.checkpoint.exists()

    def error(self) -> str | None:
        """The error that the trial has failed with in this run, if any."""
        return self.failures().get(_RUN)

    def failures(self) -> dict[str, str]:
        """The error of each run in which it has failed: several may be at work."""
        return dict((read_json(self._failure) or {}).get("errors", {}))

    @property
    def _failure(self) -> Path:
        name = hashlib.sha256(self.trial.encode()).hexdigest()[:10]
        return self.settings.work_dir / SWEEPS / str(self.sweep) / f"failure-{name}.json"

    def complete(self) -> bool:
        with exits.while_scheduling():
            return self.error() is not None or self.reached()

    def run(self) -> None:
        with exits.while_running():
            log(f"trial {self.trial}: started" + (f", up to step {self.rung}" if self.rung else ""))
            try:
                for stage in would_run(self):
                    if self.reached():  # another run has trained past the rung meanwhile
                        break
                    assert isinstance(stage, Stage)
                    self._make(stage)
            except UserError as error:
                log(f"trial {self.trial} failed: {error}")
                errors = {**self.failures(), _RUN: str(error)}
                write_json(self._failure, {"trial": self.trial, "errors": errors})

    def _make(self, stage: Stage) -> None:
        """Make a stage, or wait for the process that is making it; first what the store had promised and lacks."""
        waits = False
        while not is_complete(stage):
            try:
                return stage.make()
            except UpstreamMissing as missing:
                stage.make_here()
                for task in missing.tasks:
                    assert isinstance(task, Stage)
                    self._make(task)
            except LockHeld as error:
                if not waits:
                    log(f"trial {self.trial} is waiting: {error}")
                waits = True
                time.sleep(_WAIT_S)

    def held_out_loss(self) -> float | None:
        """The masked-LM loss on held-out examples; None if it was not measured."""
        evaluate = self.ends()[-1]
        return evaluate.counts().get(comparison.LOSS) if is_complete(evaluate) else None

    def training_loss(self) -> float | None:
        """The mean masked-LM loss of the last 50 steps of phase 1, up to the rung."""
        curves = MetricsFile(self.sibling(Pretrain, phase=1).directory / METRICS).read()
        return curves.recent(comparison.LOSS, until=self.rung)


@dataclass(frozen=True)
class Decision:
    """What becomes of the trials at a rung."""

    #: The kind of loss they are ranked by, and the losses of those that are ranked.
    by: str
    losses: Mapping[str, float]
    #: The best of these, in the share that `keep` sets.
    best: Sequence[str]
    #: The best, those brought back and those that are not ranked, in the order of the file.
    going: Sequence[str]

    @staticmethod
    def of(halving: Halving, held_out: Mapping[str, float | None], training: Mapping[str, float | None]) -> Decision:
        """From the losses of the trials that have reached the rung."""
        by, losses = comparison.scores(held_out, training)
        best = sorted(losses, key=lambda name: losses[name])[: math.ceil(len(losses) * halving.keep)]
        going = [name for name in held_out if name in {*best, *halving.bring_back} or name not in losses]
        return Decision(by, losses, best, going)

    def lines(self) -> Iterator[str]:
        for name, loss in self.losses.items():
            how = "stops" if name not in self.going else "continues" if name in self.best else "is brought back"
            yield f"trial {name} {how}: {number(loss)} {self.by}"
        for name in self.going:
            if name not in self.losses:
                yield f"trial {name} continues, not ranked: it was not evaluated at this step"


class Sweep(PipelineTask):
    """Trials of one pipeline with different settings, from a TOML file (docs/sweeps.md). What they have in common is
    made once; the same command resumes; a failed trial does not stop the others. `python -m pipeline compare` shows
    them."""

    grid: luigi.Parameter[str] = luigi.Parameter(description="the trials, a TOML file")

    def complete(self) -> bool:
        """Check the file. A finished sweep runs again, which only prints its results."""
        with exits.while_scheduling():
            _require_own_name(self.grid, self.directory)
            _require_different(self._trials(list(self.file.trials)))
        return False

    @property
    def file(self) -> SweepFile:
        return _read(Path(self.grid))

    @property
    def directory(self) -> Path:
        return self.settings.work_dir / SWEEPS / self.file.name

    def _trials(self, names: Sequence[str], rung: int | None = None) -> dict[str, Trial]:
        given: dict[str, Any] = {"sweep": self.file.name, "goal": self.file.goal, "rung": rung}
        return {name: Trial(overlay=dict(self.file.trials[name]), trial=name, **given) for name in names}

    def _stages(self) -> list[str]:
        """The fingerprints of all stages, those of the rungs too."""
        trials = [
            trial for rung in (*self.file.halving.rungs, None)
            for trial in self._trials(list(self.file.trials), rung).values()
        ]  # fmt: skip
        return sorted({stage.identity.fingerprint for trial in trials for stage in chain(trial)})

    @property
    def page(self) -> Path:
        """The comparison of the trials."""
        return self.settings.work_dir / f"compare-{self.file.name}.html"

    def run(self) -> Iterator[list[Trial]]:
        """Luigi calls it again from the start when the trials of a rung are done. Raises `UserError`."""
        with exits.while_running():
            with disk_errors(self.directory):
                self.directory.mkdir(parents=True, exist_ok=True)
            record = {"file": _place(self.grid, self.directory), "stages": self._stages()}
            write_json(self.directory / RECORD, record)
            names: Sequence[str] = list(self.file.trials)
            failed = list[str]()
            for rung in (*self.file.halving.rungs, None):
                trials = self._trials(names, rung)
                yield list(trials.values())
                # Not those that failed after this rung: at this one they still count.
                failed += [name for name, one in trials.items() if one.error() is not None and not one.reached()]
                names = [name for name in names if name not in failed]
                if rung is not None:
                    decision = self._decide({name: trials[name] for name in names})
                    for line in decision.lines():
                        log(f"step {rung}: {line}")
                    if remark := of_goals("", {name: trials[name] for name in names}, {}).remark:
                        log(f"step {rung}: note: {remark}: their losses cannot be compared; leave halving out")
                    names = decision.going
            from stages.view.comparison_page import page
            from stages.view.page import write_page

            found = self.comparison()
            write_page(self.page, page(found, time.time()))
            log(f"sweep {self.file.name}: {found.headline}")
            log(f"  page: {self.page}\n  table: python -m pipeline compare {self.grid}")
            if failed:
                raise UserError(
                    f"{len(failed)} of {len(self.file.trials)} trials failed: {', '.join(failed)}; the others are "
                    f"complete or stopped; the same command retries the failed ones"
                )

    def comparison(self) -> comparison.Comparison:
        """The trials as they are now. Raises `UserError`."""
        _require_own_name(self.grid, self.directory)
        goals, notes = self._trials(list(self.file.trials)), dict[str, str]()
        for rung in self.file.halving.rungs:
            going = [name for name in goals if name not in notes]
            trials = self._trials(going, rung)
            reached = {name: trial for name, trial in trials.items() if trial.reached()}
            if any(name not in reached and not trial.failures() for name, trial in trials.items()):
                break  # not decided yet
            for name in reached.keys() - self._decide(reached).going:
                goals[name], notes[name] = trials[name], f"stopped at step {rung}"
        return of_goals(f"Sweep {self.file.name}", goals, notes)

    def _decide(self, trials: Mapping[str, Trial]) -> Decision:
        """What becomes of trials that have reached a rung. It follows from their losses, so it is not recorded."""
        held_out = {name: trial.held_out_loss() for name, trial in trials.items()}
        return Decision.of(self.file.halving, held_out, {name: one.training_loss() for name, one in trials.items()})


def stages_of_sweeps(work_dir: Path) -> dict[str, str]:
    """The names of sweeps by the fingerprints of their stages."""
    records = {path.parent.name: read_json(path) or {} for path in sorted((work_dir / SWEEPS).glob(f"*/{RECORD}"))}
    return {fingerprint: name for name, record in records.items() for fingerprint in record.get("stages", ())}


def _place(grid: str, directory: Path) -> str:
    """A sweep's file, seen from the sweep's directory: the same when both are moved or copied together."""
    return os.path.relpath(Path(grid).resolve(), directory.resolve())


def _require_own_name(grid: str, directory: Path) -> None:
    """Raise `UserError` if the sweep in `directory` is that of another file."""
    before = (read_json(directory / RECORD) or {}).get("file")
    if before is None or before == _place(grid, directory):
        return
    other = Path(os.path.normpath(directory.resolve() / str(before)))
    if other.exists():  # else it was moved or renamed
        raise UserError(f"{grid} has the same name as {other}, whose sweep is in {directory}; rename one of the files")


def _fingerprints(trials: Mapping[str, Trial]) -> dict[str, Any]:
    return {name: [stage.identity.fingerprint for stage in trial.ends()] for name, trial in trials.items()}


def _require_different(trials: Mapping[str, Trial]) -> None:
    """Raise `UserError` for trials with the same result."""
    names: dict[str, list[str]] = {}
    for name, fingerprint in _fingerprints(trials).items():
        names.setdefault(str(fingerprint), []).append(name)
    same = [f"trials {' and '.join(group)} have the same result: no setting that it depends on differs; remove one"
            for group in names.values() if len(group) > 1]  # fmt: skip
    if same:
        raise UserError("\nerror: ".join(same))
