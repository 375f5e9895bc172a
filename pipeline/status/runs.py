"""Every training that the work directory and the store hold, with its results and settings."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import luigi

from common.errors import UserError, suggestion
from common.files import parse_utc, utc
from common.options import fields_of
from pipeline.settings.sections import Corpus, Dataset, Mnist, Model, Phase1, Phase2, Precision, Run
from pipeline.status.comparison import made_from
from pipeline.status.live_report import setting_text
from pipeline.status.stage_dirs import StageDir, StageDirs, holder, last_checkpoint_step, number_of, size_bytes
from pipeline.status.stored import StoredDir
from stages.directory.attempts import last_failure, last_sign_of_life
from stages.directory.records import read_progress
from trainer.config import LEFT_OUT, TrainConfig
from trainer.metrics.budget import fixed_steps

State = Literal["complete", "not evaluated", "phase 1 complete", "running", "failed", "interrupted", "unfinished"]
_PHASE, _MLP = "pretrain-phase", "train_mlp"
#: Counts of an evaluation, by the training's kind: loss, accuracy.
_MEASURED = {
    _PHASE: ("evaluate", "masked_lm_loss", "masked_lm_accuracy"),
    _MLP: ("evaluate_mlp", "loss", "accuracy"),
}
#: The settings that have other names in identities.
_ALIASES = {"precision": "Precision-mode", "num_epochs": "Mnist-epochs"}


@dataclass(frozen=True)
class Steps:
    """Optimizer steps of a training; `total`: None if it is not known."""

    done: int | None
    total: int | None

    def __str__(self) -> str:
        done = "?" if self.done is None else f"{self.done:,}"
        return done if self.total in (None, self.done) else f"{done} of {self.total:,}"


@dataclass(frozen=True)
class HeldRun:
    """A training, or the phases of one, with what was made from it; the fields are the keys of `--json`."""

    #: The directory of its last training.
    name: str
    state: State
    #: When its last training ended, or last showed a sign of life: seconds since 1970.
    when: float
    #: Of each phase that has begun.
    steps: Sequence[Steps]
    #: On held-out examples; None if they were not measured.
    loss: float | None
    accuracy: float | None
    #: Of its trainings, model and evaluation, without the data that it shares with others.
    bytes: int
    #: Whether the work directory and the store have it.
    here: bool
    stored: bool
    #: By the name that a command line gives them: `Phase1-lr`.
    settings: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "when": utc(self.when)}


def held_runs(stage_dirs: StageDirs, stored: Collection[str]) -> list[HeldRun]:
    """All training runs, newest first; a phase 1 is part of its phase 2. `stored`: the store's fingerprints."""
    chains = stage_dirs.chains(lambda one: _kind(one) is not None)
    return sorted((_held(chain, stage_dirs, stored) for chain in chains), key=lambda run: run.when, reverse=True)


def matching(runs: Sequence[HeldRun], conditions: Mapping[str, str]) -> list[HeldRun]:
    """The runs with these settings; numbers are compared as numbers. Raises `UserError` for a setting that none has."""
    known = sorted({name for run in runs for name in run.settings})
    for name in conditions:
        if runs and name not in known:
            raise UserError(f"no run records a setting {name}; {suggestion(name, known)}")
    return [run for run in runs if all(_is_same(run.settings.get(name, ""), text) for name, text in conditions.items())]


def differing(runs: Sequence[HeldRun]) -> list[str]:
    """Names of the settings that differ among the runs that have any setting of the same section."""
    sections = [{_section(name) for name in run.settings} for run in runs]
    return [
        name
        for name in dict.fromkeys(name for run in runs for name in run.settings)
        if len({run.settings.get(name) for run, own in zip(runs, sections, strict=True) if _section(name) in own}) > 1
    ]


def _section(name: str) -> str:
    return name.partition("-")[0]


def _kind(stage_dir: StageDir) -> str | None:
    """A key of `_MEASURED`; None: it is not a training."""
    return next((kind for kind in _MEASURED if stage_dir.label.startswith(kind)), None)


def _held(chain: list[StageDir], stage_dirs: StageDirs, stored: Collection[str]) -> HeldRun:
    last, kind = chain[-1], _kind(chain[-1])
    assert kind is not None
    trainings = [one for one in chain if _kind(one) is not None]
    label, loss, accuracy = _MEASURED[kind]
    merged = made_from(last, "merge_shards", stage_dirs)
    evaluations = [one for model in (*merged, last) for one in made_from(model, label, stage_dirs)]
    evaluated = next((one for one in evaluations if one.is_complete), None)
    counts = {} if evaluated is None else evaluated.record["counts"]
    between = [one for one in chain if one.label == "convert_checkpoint"]
    return HeldRun(
        last.path.name,
        _state(last, evaluated),
        _when(last),
        [_steps(one) for one in trainings],
        number_of(counts.get(loss)),
        number_of(counts.get(accuracy)),
        sum(map(_size, (*trainings, *between, *merged, *evaluations))),
        not isinstance(last, StoredDir),
        isinstance(last, StoredDir) or last.fingerprint in stored,
        dict(_settings([*reversed(trainings), *chain])),
    )


def _state(training: StageDir, evaluated: StageDir | None) -> State:
    if training.is_complete:
        if training.label == f"{_PHASE}1":
            return "phase 1 complete"
        return "not evaluated" if evaluated is None else "complete"
    if isinstance(training, StoredDir):
        return "unfinished"
    if holder(training.path) is not None:
        return "running"
    return "interrupted" if last_failure(training.path) is None else "failed"


def _when(training: StageDir) -> float:
    if isinstance(training, StoredDir):
        return training.written
    if training.is_complete:
        seconds: float = min(training.written, training.record["seconds"])  # a damaged record has any number
        return parse_utc(training.record["started"]).timestamp() + max(0.0, seconds)
    return last_sign_of_life(training.path) or training.written


def _steps(training: StageDir) -> Steps:
    if training.is_complete:
        done = _whole(training.record["counts"].get("steps"))
        return Steps(done, done)
    total = _whole(training.record["parameters"].get("max_steps"))
    if isinstance(training, StoredDir):
        return Steps(training.steps, total)
    progress = read_progress(training.path)
    done = progress.get("done") if progress.get("unit") == "steps" else last_checkpoint_step(training.path)
    return Steps(done or 0, total or fixed_steps(training.path, int(training.record.get("phase") or 1)))


def _whole(value: Any) -> int | None:
    """A number of steps of a record; None for anything else, as a damaged record has it."""
    return value if isinstance(value, int) else None


def _size(stage_dir: StageDir) -> int:
    return stage_dir.bytes if isinstance(stage_dir, StoredDir) else size_bytes(stage_dir.path)


def _settings(stage_dirs: Sequence[StageDir]) -> Iterator[tuple[str, str]]:
    """(name, text) of everything that decides the result, including what identities leave out at its default."""
    seen = set[str]()
    for stage_dir in stage_dirs:
        parameters = dict(stage_dir.record["parameters"])
        model = parameters.pop("model", None)
        if _kind(stage_dir) == _PHASE:
            parameters |= {name: value for name, value in _left_out().items() if name not in parameters}
        given = {_name(stage_dir.label, key): value for key, value in parameters.items()}
        if isinstance(model, dict):
            given |= {f"Model-{key.replace('_', '-')}": value for key, value in model.items()}
        yield from ((name, setting_text(value)) for name, value in given.items() if name not in seen)
        seen |= given.keys()


@functools.cache
def _left_out() -> dict[str, Any]:
    """What a phase's identity leaves out, by name, at these values."""
    return {
        name: field.default for name, (field, about) in fields_of(TrainConfig).items() if about.omit_default
    } | LEFT_OUT


@functools.cache
def _name(label: str, key: str) -> str:
    """The setting as luigi's command line names it; `stage.parameter` for what is not a setting."""
    if key in _ALIASES:
        return _ALIASES[key]
    own: dict[str, type[luigi.Config]] = {"phase1": Phase1, "phase2": Phase2, _MLP: Mnist}
    for section in (own.get(label.rpartition("-")[2], Run), Corpus, Dataset, Model, Precision, Run):
        if key in dict(section.get_params()):
            return f"{section.__name__}-{key.replace('_', '-')}"
    return f"{label}.{key}"


def _is_same(recorded: str, asked: str) -> bool:
    try:
        return float(recorded) == float(asked)
    except ValueError:
        return recorded.lower() == asked.lower()
