"""The Neuron tutorial's MLP on MNIST or any data set in its format: 28 × 28 grey images in 10 classes."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray

from common.errors import UserError
from common.options import check, option
from trainer.data.idx import read_idx
from trainer.data.order import Samples
from trainer.models.mlp import CLASSES, HIDDEN, MLP, PIXELS, ImageBatch
from trainer.models.operations import Operations
from trainer.parallel.tensor import TensorParallel
from trainer.workloads.base import StepCost, Workload

#: The published file names of the two sets: images, labels.
TRAINING = ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz")
HELD_OUT = ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz")


class Images:
    """A set of images and their labels, in memory."""

    #: Reading 32 samples one by one takes as long as a step of 32 samples.
    rows_at_once = 2048

    def __init__(self, directory: Path, names: tuple[str, str]) -> None:
        """Read the files `names` of `directory`. Raises `UserError`."""
        paths = [directory / name for name in names]
        for path in paths:
            if not path.is_file():
                raise UserError(f"there is no {path}; give the directory that has MNIST's files {', '.join(names)}")
        images, labels = read_idx(paths[0], dimensions=3), read_idx(paths[1], dimensions=1)
        if images.shape[1] * images.shape[2] != PIXELS:
            raise UserError(
                f"{paths[0]} has images of {images.shape[1]} × {images.shape[2]}; the model takes 28 × 28; "
                f"give MNIST's files, or others of their form"
            )
        if len(images) != len(labels):
            raise UserError(
                f"{paths[0]} has {len(images)} images, {paths[1]} {len(labels)} labels; give files of one set"
            )
        if not len(labels) or labels.max() >= CLASSES:
            seen = f"the label {labels.max()}" if len(labels) else "no label"
            raise UserError(f"{paths[1]} holds {seen}; allowed: labels 0 to {CLASSES - 1}; give MNIST's files")
        self.pixels: NDArray[np.uint8] = images.reshape(-1, PIXELS)
        self.labels = labels.astype(np.int64)
        self._paths = paths

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def identity(self) -> str:
        """sha256, in hex, of the files."""
        digest = hashlib.sha256()
        for path in self._paths:
            digest.update(path.read_bytes())
        return digest.hexdigest()

    def micro_batches(
        self, samples: Samples, size: int, *, step: int = 0, epoch: int = 0
    ) -> tuple[list[ImageBatch], list[tuple[int]]]:
        """`samples` in order, `size` at a time, scaled to [0, 1]; the loss is a sum over images."""
        images = torch.from_numpy(self.pixels[samples.row]).to(torch.float32).div_(255).split(size)
        labels = torch.from_numpy(self.labels[samples.row]).split(size)
        batches = [ImageBatch(*both) for both in zip(images, labels, strict=True)]
        return batches, [(len(batch.labels),) for batch in batches]


@dataclass(frozen=True, kw_only=True)
class MnistOptions:
    """The options that only this workload has."""

    option_separator: ClassVar[str] = "_"

    data_dir: Path = option(Path("mnist"), group="data", decides=False, help="directory with the data set's .gz files")
    epochs: int = option(
        4, group="training", least=1, unit="epochs", help="times all images are seen, except for an epoch's tail"
    )

    def __post_init__(self) -> None:
        check(self)


class MnistWorkload(Workload):
    """4 epochs of SGD, 32 images per worker, a learning rate that grows with the workers."""

    options = MnistOptions
    losses = MappingProxyType({"nll_loss": 1.0})
    threads = 1  # a step is 0.7 ms, and threads that wait for each other take longer (docs/decisions.md)
    defaults = MappingProxyType(
        {
            "micro_batch_size": 32,
            "grad_accum_usteps": 1,
            # The tutorial's 0.01 gets 93 % of the held-out images right after its 4 epochs (docs/decisions.md).
            "lr": 0.05,
            "schedule": "constant",
            "warmup_steps": 0,
            "optimizer": "SGD",
            "weight_decay": 0.0,
            "max_grad_norm": 0.0,
            "precision": "fp32",
            "shards_per_ckpt": 0,
            "log_interval": 625,
        }
    )
    # One phase, whose length is in epochs; the MLP is not split.
    without = frozenset({"max_steps", "budget", "phase2", "phase1_end_step", "tensor_parallel_size"})

    def __init__(self, images: Images, epochs: int) -> None:
        self.images = images
        self.epochs = epochs
        self.rows_per_shard = np.array([len(images)])

    @classmethod
    def of(cls, options: MnistOptions) -> Self:
        return cls(Images(options.data_dir.expanduser(), TRAINING), options.epochs)

    def describe(self) -> dict[str, Any]:
        return {"architecture": "MLP", "layers": [PIXELS, *HIDDEN, CLASSES]}

    def make_model(self, operations: Operations, ranks: TensorParallel) -> MLP:
        return MLP()

    def has_weight_decay(self, name: str) -> bool:
        return not name.endswith("bias")

    def is_hidden_matrix(self, name: str) -> bool:
        return name in ("fc1.weight", "fc2.weight")

    def identity(self, cache: Path) -> str:
        return self.images.identity

    def reader(self, *, static_shapes: bool, without_padding: bool, seed: int, falling: range) -> Images:
        return self.images  # SampleOrder makes no smaller batches

    def work(self, counts: Sequence[int], micro_batches: int) -> StepCost:
        sizes = [PIXELS, *HIDDEN, CLASSES]
        flops = 6.0 * counts[0] * sum(a * b for a, b in itertools.pairwise(sizes))
        return StepCost(counts[0], flops, flops)

    def max_steps(self, given: int, global_batch_size: int) -> int:
        return self.epochs * max(1, len(self.images) // global_batch_size)

    def learning_rate(self, given: float, workers: int) -> float:
        return given * workers

    def last_lines(self, summary: dict[str, Any]) -> list[str]:
        """As the tutorial's script prints them."""
        rate = summary["iterations_per_s"]
        return [
            "----------Training ---------------",
            f"Train throughput (iter/sec): {rate}",
            f"Final loss is {summary['loss']:.4f}" if summary["loss"] is not None else "Final loss was not recorded",
            "----------End Training ---------------",
        ]
