"""Everything that resuming needs besides the tensors, in one type."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from common.errors import CheckpointError
from trainer.config import CHANGEABLE, LEFT_OUT
from trainer.data.batch_ramp import BatchRamp, BatchSizes, batch_of
from trainer.models.config import ModelConfig
from trainer.optim.schedule import DECAY_OPTIONS
from trainer.registry import PRECISIONS, stable_steps

#: Name of the file in a checkpoint directory.
STATE = "state.json"
_BATCH_OPTIONS = ("global_batch_size", "batch_ramp_steps", "batch_ramp_parts")


@dataclass(frozen=True)
class TrainState:
    """The position of a run, and what must not change when it is resumed."""

    phase: int
    #: Optimizer steps done in this phase.
    step: int
    #: Optimizer steps done in all phases.
    global_step: int
    #: Sequences seen in this phase.
    samples_consumed: int
    epoch: int
    seed: int
    global_batch_size: int
    #: `Workload.identity` of the data set.
    data: str
    order_version: int
    optimizer: str
    precision: str
    #: `ModelConfig.to_dict`.
    model: dict[str, Any]
    #: For information only: the layout and the version it was trained with.
    data_parallel_size: int
    tensor_parallel_size: int
    micro_batch_size: int
    torch_version: str
    #: The other deciding options of the configuration, by name. Empty in old checkpoints.
    settings: dict[str, Any] = field(default_factory=dict)
    #: Changes to them made by resumed runs: {"step", "name", "old", "new"}, by global step; those of the batch's size
    #: also have the "batch" of this phase from which they hold.
    changes: list[dict[str, Any]] = field(default_factory=list)
    #: Batches of this phase's data, counted from 0, that were left out because their steps were not finite.
    skipped: list[int] = field(default_factory=list)
    #: sha256 of the manifest of the checkpoint that training in this output directory began with; empty: initial
    #: weights; None: not known.
    origin: str | None = None
    #: Optimizer steps behind the phase's first weights and moments, from a training on other data.
    steps_before: int = 0

    def to_json(self) -> dict[str, Any]:
        """`steps_before` is included only if there are any."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "steps_before" or value}

    @classmethod
    def read(cls, checkpoint: Path) -> Self:
        """The state in a valid checkpoint directory. Raises `CheckpointError` for one of another version."""
        path = checkpoint / STATE
        record = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(record, dict):
            raise CheckpointError(f"{path} is not a JSON object; use another checkpoint")
        known = {field.name: field for field in dataclasses.fields(cls)}
        nothing = dataclasses.MISSING
        needed = {name for name, one in known.items() if one.default is nothing and one.default_factory is nothing}
        for verb, names in (("lacks", needed - record.keys()), ("holds an unknown", record.keys() - known.keys())):
            if names:
                raise CheckpointError(
                    f"{path} {verb} {min(names)}: another version of this program wrote it; continue with that "
                    f"version, or start anew in another output directory"
                )
        return cls(**record)

    def advanced(self, epoch: int, samples: int) -> Self:
        """The state after one more step, of that many samples in `epoch`."""
        return dataclasses.replace(
            self,
            step=self.step + 1,
            global_step=self.global_step + 1,
            samples_consumed=self.samples_consumed + samples,
            epoch=epoch,
        )

    def at(self, other: TrainState) -> Self:
        """This run at the position of `other`."""
        return dataclasses.replace(
            self,
            step=other.step,
            global_step=other.global_step,
            samples_consumed=other.samples_consumed,
            epoch=other.epoch,
            changes=other.changes,
            steps_before=other.steps_before,
            skipped=sorted({*self.skipped, *other.skipped}),
        )

    @property
    def deciding(self) -> dict[str, Any]:
        """Everything that must not change in a resumed run, by name; old checkpoints lack some of it."""
        names = ("phase", "data", "seed", "global_batch_size", "order_version", "optimizer", "precision")
        mine = {name: getattr(self, name) for name in names}
        return {**self.model, **self.settings, **mine}

    def batch_sizes(self) -> list[BatchSizes]:
        """The sizes of this phase's global batches, in order: the last ones are this run's."""
        options, end = {name: self.deciding[name] for name in _BATCH_OPTIONS}, None
        found = list[BatchSizes]()
        changes = reversed([change for change in self.changes if "batch" in change])
        for batch, at_once in itertools.groupby(changes, key=lambda change: change["batch"]):
            found.append(_sizes(options, end))
            options, end = {**options, **{change["name"]: change["old"] for change in at_once}}, batch
        return [_sizes(options, end), *reversed(found)]

    @property
    def stable_steps(self) -> int:
        """Steps of the phase that do not depend on `DECAY_OPTIONS`; 0 in old checkpoints."""
        known = {name: self.settings[name] for name in DECAY_OPTIONS if name in self.settings}
        return stable_steps(**known) if len(known) == len(DECAY_OPTIONS) else 0

    @property
    def optimizer_steps(self) -> int:
        """Updates of the optimizer's moments so far."""
        return self.steps_before + self.step

    @property
    def known_precision(self) -> str | None:
        """None in a checkpoint that another tool has written: its moments are fp32."""
        return self.precision if self.precision in PRECISIONS else None

    def continuing(self, other: TrainState, checkpoint: Path) -> Self:
        """This run before its first step on new data, with the weights and moments of `other`, the state in
        `checkpoint`. Raises `CheckpointError` if it cannot use them."""
        self.require_same_model(other, checkpoint)
        for name in ("optimizer", "precision"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs and not (name == "precision" and other.known_precision is None):
                raise CheckpointError(
                    f"{checkpoint} was trained with {name} = {theirs}, this run has {mine}, for which the optimizer's "
                    f"state means something else; continue with {theirs}, or start anew"
                )
        return dataclasses.replace(self, steps_before=other.optimizer_steps)

    def resumed(self, other: TrainState, checkpoint: Path, *, allowed: Sequence[str]) -> Self:
        """This run at the position of `other`, the state in `checkpoint`; `allowed` differences are recorded.

        A checkpoint of the stable part of both runs may differ in `DECAY_OPTIONS`, which have decided nothing yet.
        Raises `CheckpointError` if this run cannot continue from there.
        """
        self.require_same_model(other, checkpoint)
        ours, theirs = LEFT_OUT | self.deciding, LEFT_OUT | other.deciding
        shared = min(self.stable_steps, other.stable_steps)
        undecided = DECAY_OPTIONS if other.step <= shared else ()
        begins = batch_of(other.step, other.skipped)
        batch = {"batch": begins} if other.global_batch_size else {}  # a converted checkpoint has none
        differ = [
            {
                "step": other.global_step,
                "name": name,
                "old": theirs[name],
                "new": mine,
                **(batch if name in _BATCH_OPTIONS else {}),
            }
            for name, mine in ours.items()
            if name in theirs and theirs[name] != mine and name not in undecided
        ]
        refused = [change for change in differ if change["name"] not in allowed]
        if refused:
            what = "; ".join(f"{change['name']} = {change['old']}, this run has {change['new']}" for change in refused)
            advice = _advice([change["name"] for change in refused], other.global_step - other.step, shared)
            raise CheckpointError(f"{checkpoint} was trained with {what}: {advice}")
        skipped = other.skipped
        if any(change["name"] in (*_BATCH_OPTIONS, "data", "seed") for change in differ):
            skipped = [one for one in skipped if one < begins]  # from here on the numbers mean other samples
        return dataclasses.replace(
            self.at(dataclasses.replace(other, skipped=skipped)), changes=[*other.changes, *differ]
        )

    def require_same_model(self, other: TrainState, checkpoint: Path) -> None:
        """Raise `CheckpointError` if `other` is the state of another model. Dropout may differ."""
        for name in {**self.model, **other.model}:
            default = getattr(ModelConfig, name, None)
            mine, theirs = self.model.get(name, default), other.model.get(name, default)
            if mine != theirs and "dropout" not in name:
                raise CheckpointError(
                    f"{checkpoint} holds another model: its {name} is {theirs}, this run's is {mine}; "
                    f"give the model it was trained with, or another checkpoint"
                )


def _sizes(options: dict[str, int], end: int | None) -> BatchSizes:
    whole, steps, parts = (options[name] for name in _BATCH_OPTIONS)
    return BatchSizes(whole, BatchRamp(steps, parts), end)


def _advice(names: list[str], before: int, shared: int) -> str:
    """`before`: global step at which the phase began; `shared`: its steps that both runs have in common."""
    if "order_version" in names:
        return (
            "that version of the program drew its samples and random numbers in another order; finish the run with it, "
            "or start anew in another output directory"
        )
    advice = "the result would not be the same; continue with that, or start anew in another output directory"
    if shared and set(names) <= set(DECAY_OPTIONS):
        advice = f"{advice}, or resume from a checkpoint up to step {before + shared}, which both share (--resume_step)"
    if set(names) <= set(CHANGEABLE):
        return f"{advice}, or allow the change from here on with --allow_changes {' '.join(names)}"
    return advice
