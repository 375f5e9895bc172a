"""A comparison of training runs: what differs, how good they are, and which is the best."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stages.directory.records import held_out_shards
from stages.view.curves import Curves
from stages.view.run import Run
from stages.view.text import duration, number, percent

#: The loss that trials are compared by: unlike the sum of both, it means the same without next-sentence prediction.
LOSS = "masked_lm_loss"


def scores(held_out: Mapping[str, float | None], training: Mapping[str, float | None]) -> tuple[str, dict[str, float]]:
    """What trials are ranked by, and its value for those that have it (lower is better): the held-out masked-LM loss,
    which is comparable even if masking, batches or dropout differ; if none has it, the mean of the last 50 steps in
    training."""
    by = "held-out masked-LM loss"
    found: Mapping[str, float | None] = {name: loss for name, loss in held_out.items() if loss is not None}
    if not found:
        by, found = "masked-LM loss of the last 50 steps in training, as none has a held-out loss", training
    return by, {name: math.inf if value is None or math.isnan(value) else value for name, value in found.items()}


@dataclass(frozen=True)
class Trial:
    """A training run, or the two phases of one, and their evaluation."""

    name: str
    run: Run
    #: Why it is not complete, if that is known: "stopped at step 200".
    note: str = ""

    @property
    def state(self) -> str:
        if self.note or not self.is_complete:
            return self.note or self.run.headline[1]
        return "complete"

    @property
    def is_complete(self) -> bool:
        return not self.note and all(training.is_complete for training in self.run.trainings.values())

    @property
    def curves(self) -> Curves:
        """The curves of the last phase that has recorded steps."""
        return next(reversed(self.run.curves.values()), Curves())

    @property
    def own_steps(self) -> list[int]:
        """The steps of `curves`, counted from the beginning of their phase."""
        return [step - self.curves.steps[0] + 1 for step in self.curves.steps]

    @property
    def elapsed(self) -> list[float]:
        """Seconds of training until the end of each step of `curves`."""
        return list(itertools.accumulate(self.curves.values["step_time_s"]))

    @property
    def training_loss(self) -> float | None:
        return self.curves.recent(LOSS)

    @property
    def held_out(self) -> dict[str, float]:
        """The counts of the evaluation; {} if nothing was measured."""
        counts = self.run.counts("evaluate")
        return counts if counts.get("samples") else {}

    @property
    def examples(self) -> object:
        """What tells the examples of its evaluation from others: their shards, or the data set if that is gone."""
        evaluated = self.run.stage("evaluate")
        record = {} if evaluated is None else evaluated.record
        made = record.get("upstream", {}).get("dataset")
        dataset = next((one.record for one in self.run.stages if one.record.get("fingerprint") == made), {})
        shards = held_out_shards(record, dataset).values()
        return sorted(shards) or made, record.get("parameters", {}).get("max_samples")

    @property
    def seconds(self) -> float:
        """Time at work of its training runs."""
        return sum(training.seconds_at_work for training in self.run.trainings.values())

    @property
    def steps(self) -> int:
        return sum(len(curves.steps) for curves in self.run.curves.values())


@dataclass(frozen=True)
class Comparison:
    """Trials side by side."""

    title: str
    trials: Sequence[Trial]

    @functools.cached_property
    def differing(self) -> list[tuple[str, str]]:
        """(section, name) of the settings that are not the same for all trials."""
        keys = dict.fromkeys(
            (s, k) for trial in self.trials for s, values in trial.run.settings.items() for k in values
        )
        return [(s, k) for s, k in keys if len({trial.run.settings.get(s, {}).get(k) for trial in self.trials}) > 1]

    @functools.cached_property
    def _ranking(self) -> tuple[str, dict[str, float]]:
        done = [trial for trial in self.trials if trial.is_complete]
        held_out = {trial.name: trial.held_out.get(LOSS) for trial in done}
        return scores(held_out, {trial.name: trial.training_loss for trial in done})

    @property
    def winner(self) -> str | None:
        """The best complete trial's name; None: no complete trial has a loss, or their losses cannot be compared."""
        found = {name: loss for name, loss in self._ranking[1].items() if loss < math.inf}
        return min(found, key=lambda name: found[name]) if found and not self.remark else None

    @property
    def headline(self) -> str:
        by, found = self._ranking
        if not found:
            return "no trial is complete yet"
        if self.winner is None:
            return f"no winner: {self.remark or 'no complete trial has recorded a loss'}"
        return f"winner: {self.winner}, {number(found[self.winner])} {by}"

    @property
    def remark(self) -> str:
        """Why the held-out losses cannot be compared; '' if they can."""
        examples = [trial.examples for trial in self.trials if trial.held_out]
        differ = any(one != examples[0] for one in examples)
        return "the trials were evaluated on different held-out examples" if differ else ""

    @property
    def head(self) -> list[str]:
        names = [key for _, key in self.differing]
        settings = [key if names.count(key) == 1 else f"{section}.{key}" for section, key in self.differing]
        return ["trial", *settings, "steps", "training loss", "held-out loss", "accuracy", "time", "state"]

    @property
    def rows(self) -> list[list[str]]:
        """The table, in the order of the trials."""
        return [
            [
                trial.name,
                *(trial.run.settings.get(section, {}).get(key, "") for section, key in self.differing),
                f"{trial.steps:,}",
                number(trial.training_loss),
                number(trial.held_out.get(LOSS)),
                percent(trial.held_out["masked_lm_accuracy"]) if trial.held_out else "–",
                duration(trial.seconds),
                trial.state,
            ]
            for trial in self.trials
        ]
