"""Trials of a sweep, or all training runs of a work directory, for comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping

from pipeline.status.chain import ChainGoal
from pipeline.status.live_report import view
from pipeline.status.stage_dirs import StageDir, StageDirs, holder, number_of
from stages.directory.records import flat_texts
from stages.report import view_of
from stages.view.comparison import LOSS, Comparison, Trial

_PRETRAIN = "pretrain-phase"


def of_goals(title: str, goals: Mapping[str, ChainGoal], notes: Mapping[str, str]) -> Comparison:
    """The trials up to `goals`, by name. `notes`: why a trial does not continue, by its name."""
    return Comparison(title, [Trial(name, view(goal), notes.get(name, "")) for name, goal in goals.items()])


def of_work_directory(stage_dirs: StageDirs) -> Comparison:
    """All training runs, oldest first, each named by its directory. A phase 1 is part of the phase 2 after it."""
    chains = stage_dirs.chains(lambda one: one.label.startswith(_PRETRAIN))
    return Comparison(f"Trainings in {stage_dirs.work_dir}", [_trial(chain, stage_dirs) for chain in reversed(chains)])


def _trial(chain: list[StageDir], stage_dirs: StageDirs) -> Trial:
    training = chain[-1]
    merged = made_from(training, "merge_shards", stage_dirs)
    if training.is_complete:  # what was evaluated at a rung is not what it ended with
        merged = [one for one in merged if "step" not in one.record["parameters"]]
    stages = [*chain, *[one for merge in merged for one in evaluation_of(merge, stage_dirs)][:1]]
    parameters = {one.label: flat_texts(one.record["parameters"]) for one in stages if one.label != "evaluate"}
    note = "running" if holder(training.path) else "" if training.is_complete else "not finished"
    return Trial(training.path.name, view_of([one.path for one in stages], parameters), note)


def evaluation_of(merged: StageDir, stage_dirs: StageDirs) -> list[StageDir]:
    """The newest complete evaluation of a merged model; [] without one."""
    return [one for one in made_from(merged, "evaluate", stage_dirs) if one.is_complete and _has_numbers(one)][:1]


def _has_numbers(evaluated: StageDir) -> bool:
    """Whether the counts that trials are compared by are numbers: a damaged manifest has anything."""
    counts = evaluated.record["counts"]
    names = ("samples", LOSS, "masked_lm_accuracy") if counts.get("samples") else ()
    return all(number_of(counts.get(name)) is not None for name in names)


def made_from(source: StageDir, label: str, stage_dirs: StageDirs) -> list[StageDir]:
    """Stages made from `source`; those made from its last checkpoint before those of a rung, newest first."""
    found = [one for one in stage_dirs.by_label[label] if source.fingerprint in one.record["upstream"].values()]
    return sorted(found, key=lambda one: -(number_of(one.record["parameters"].get("step")) or math.inf))
