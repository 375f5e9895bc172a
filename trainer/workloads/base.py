"""The interface between the training loop and a model with its data.

To add a model: a module in `trainer/models/`, a file like `mnist.py` here, and its line in `WORKLOADS`.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from trainer.data.loader import Reader
from trainer.data.masking import Masking
from trainer.data.order import Int64s
from trainer.models.base import Model
from trainer.models.operations import Operations
from trainer.parallel.tensor import TensorParallel

#: The name of the loss that has a unigram baseline.
MASKED_LM_LOSS = "masked_lm_loss"


@dataclass(frozen=True)
class StepCost:
    """The work of one step of all workers."""

    samples: int
    #: Forward and backward, as computed: padded rows count in full, attention between packed sequences does not.
    flops: float
    #: The same by the formula that published rates use, which may count more.
    usual_flops: float


class Workload(abc.ABC):
    """A model, the data set it is trained on, and its options."""

    #: The dataclass of the options that only this workload has (see `common.options`).
    options: ClassVar[type]
    #: Defaults of options that differ from those of their fields, by field name.
    defaults: ClassVar[Mapping[str, Any]] = {}
    #: Fields of `TrainConfig` and `RunOptions` that are not options of this workload.
    without: ClassVar[frozenset[str]] = frozenset()
    #: The losses' names in the metrics, in the order of the reader's counts, and the factor of each in the sum that
    #: training minimises.
    losses: Mapping[str, float]
    #: Samples in each file of the data set.
    rows_per_shard: Int64s
    #: Size of the vocabulary, which tensor parallelism pads; 0: the model has none.
    vocab_size: int = 0
    #: How samples are masked whenever they are read; None: as they are stored, or not at all.
    masking: Masking | None = None
    #: Most CPU threads that speed up its steps; None: all available.
    threads: int | None = None

    @classmethod
    @abc.abstractmethod
    def of(cls, options: Any) -> Self:
        """The workload that an instance of `options` describes. Raises `UserError`."""

    @abc.abstractmethod
    def describe(self) -> dict[str, Any]:
        """The model, as checkpoints record it; models that differ in anything but dropout cannot share a checkpoint."""

    @abc.abstractmethod
    def make_model(self, operations: Operations, ranks: TensorParallel) -> Model:
        """This rank's share of the model, for a device with these operations; on the CPU, uninitialised."""

    def initialise(self, model: Any, seed: int) -> None:
        """Set all parameters of a model that `make_model` returned to initial values. Raises `UserError`."""
        model.initialise(seed)

    def begin_phase(self, model: Any, before: Mapping[str, Any]) -> str:
        """Prepare a model whose weights are those of another phase, trained with the settings `before`, for this one;
        returns a line for the log, or ""."""
        return ""

    @abc.abstractmethod
    def has_weight_decay(self, name: str) -> bool:
        """Whether weight decay applies to the parameter called `name`."""

    @abc.abstractmethod
    def is_hidden_matrix(self, name: str) -> bool:
        """Whether the parameter called `name` is a weight matrix between hidden layers, which Muon orthogonalises."""

    @abc.abstractmethod
    def identity(self, cache: Path) -> str:
        """Identifies the data set by its content; file hashes are cached in the directory `cache`. Raises
        `UserError`."""

    @abc.abstractmethod
    def reader(self, *, static_shapes: bool, without_padding: bool, seed: int, falling: range) -> Reader:
        """A reader of the data set. With `static_shapes` all micro-batches have the same shapes; `without_padding`:
        row padding is not computed.

        `seed`: for what it draws; `falling`: the steps, from 0, in which a masking rate falls.
        """

    @abc.abstractmethod
    def work(self, counts: Sequence[int], micro_batches: int) -> StepCost:
        """The work of a step, from its reader's counts and its micro-batches, summed over the workers."""

    def settings(self) -> dict[str, Any]:
        """Options of the workload that decide the result, by name; `describe` has those of the model."""
        return {}

    def max_steps(self, given: int, global_batch_size: int) -> int:
        """Optimizer steps in the whole phase; `given`: the option's value."""
        return given

    def learning_rate(self, given: float, workers: int) -> float:
        """The peak learning rate for `workers` data-parallel workers; `given`: the option's value."""
        return given

    def summary(self) -> dict[str, Any]:
        """Entries for the summary of a run."""
        return {}

    def last_lines(self, summary: dict[str, Any]) -> list[str]:
        """Lines for the console at the end of a run, from its `summary`; [] for the usual one."""
        return []
