"""What the loop has to know of a model and its data, so that everything else is shared.

To add a model: a module in `trainer/models/`, a file like `mnist.py` here, and its line in `WORKLOADS`.
"""

from __future__ import annotations

import abc
import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from trainer.data.loader import Reader
from trainer.data.order import Int64s
from trainer.models.base import Model
from trainer.models.operations import Operations
from trainer.parallel.mesh import Mesh
from trainer.parallel.tensor import TensorParallel


@dataclass(frozen=True)
class StepCost:
    """What a step of all workers has done."""

    samples: int
    #: Forward and backward, of what is computed: padded rows whole, but no attention between packed sequences.
    flops: float
    #: By the formula that others publish their rates with, where that counts more.
    usual_flops: float


class Workload(abc.ABC):
    """A model, the data set it is trained on, and what its options are."""

    #: Defaults of the trainer's options that differ from BERT's, and values of options that do not apply.
    defaults: ClassVar[dict[str, Any]] = {}
    #: The losses' names in the metrics.
    losses: ClassVar[tuple[str, ...]]
    #: Samples in each file of the data set.
    rows_per_shard: Int64s
    #: Words the model knows, where it knows words: what tensor parallelism pads.
    vocab_size: int = 0
    #: Threads of the CPU that its steps are worth, at most; None: all there are.
    threads: int | None = None

    @staticmethod
    @abc.abstractmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        """Add the options that are this workload's alone."""

    @classmethod
    @abc.abstractmethod
    def of(cls, args: argparse.Namespace) -> Self:
        """The workload the options ask for. Raises `UserError`."""

    @abc.abstractmethod
    def describe(self) -> dict[str, Any]:
        """The model, as checkpoints record it: two that differ in anything but dropout cannot share one."""

    @abc.abstractmethod
    def make_model(self, operations: Operations, ranks: TensorParallel) -> Model:
        """This rank's share of the model, for a device with these operations; on the CPU, not initialised."""

    @abc.abstractmethod
    def has_weight_decay(self, name: str) -> bool:
        """Whether weight decay applies to the parameter called `name`."""

    @abc.abstractmethod
    def identity(self, cache: Path, log: Callable[[str], None]) -> str:
        """Tells the data set from any other, by its content. What is read to know it is remembered in the directory
        `cache`; `log` is told when that takes long. Raises `UserError`."""

    @abc.abstractmethod
    def reader(self, *, static_shapes: bool) -> Reader:
        """What reads the data set; with `static_shapes` all micro-batches have the same shapes."""

    @abc.abstractmethod
    def work(self, counts: Sequence[int]) -> StepCost:
        """The work of a step, from what its reader has counted, summed over the workers."""

    def max_steps(self, args: argparse.Namespace, global_batch_size: int) -> int:
        """Optimizer steps in the whole run."""
        return int(args.max_steps)

    def learning_rate(self, args: argparse.Namespace, mesh: Mesh) -> float:
        """The peak learning rate."""
        return float(args.lr)

    def summary(self) -> dict[str, Any]:
        """What the summary of a run says of the workload."""
        return {}

    def last_words(self, summary: dict[str, Any]) -> list[str]:
        """Lines for the console at the end of a run, of which `summary` is written."""
        return []
