"""What the checks of the self-test are given, and what they return."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from trainer.config import TrainConfig
from trainer.devices.base import Device
from trainer.launch.preemption import Interruptions
from trainer.loop import Trainer
from trainer.models.config import ModelConfig
from trainer.parallel.fp32_sums import LayerNorm
from trainer.parallel.mesh import Mesh
from trainer.precision import Precision
from trainer.run import Run
from trainer.workloads.base import Workload
from trainer.workloads.bert import BertOptions, BertWorkload


@dataclass(frozen=True)
class Finding:
    """A measurement and the most that is allowed."""

    #: What was measured: an operation, a parameter.
    what: str
    #: None: not measured, for the reason that `what` gives.
    measured: float | None = None
    limit: float = 0.0

    @property
    def passed(self) -> bool:
        """False for NaN, too."""
        return self.measured is None or self.measured <= self.limit

    @property
    def severity(self) -> float:
        """For sorting: -1 if not measured, up to 1 if passed, more if failed."""
        if self.measured is None:
            return -1.0
        if self.passed:
            return self.measured / self.limit if self.limit else 0.0
        ratio = self.measured / self.limit if self.limit else math.inf
        return ratio if ratio > 1 else math.inf


@dataclass(frozen=True)
class Subject:
    """A started device, and the training it is to be used for."""

    #: One optimizer step of two micro-steps, without checkpoints or logs; its output directory is temporary.
    config: TrainConfig
    model: ModelConfig
    #: A data set of one global batch of random rows.
    data: Path
    mesh: Mesh
    #: "eager", "compiled" → the device that runs operations in that way.
    devices: dict[str, Device]
    #: Why there is no "compiled" one; empty: there is, or the device has no compiler.
    not_compiled: str = ""

    @property
    def device(self) -> Device:
        return next(iter(self.devices.values()))

    def workload(self, model: ModelConfig) -> Workload:
        """Training of `model` on the sample."""
        shards = BertWorkload.of(BertOptions(data_dir=self.data, debug=True)).shards
        return BertWorkload(model, shards)

    def run(self, device: Device, model: ModelConfig, *, mesh: Mesh | None = None, **changes: object) -> Run:
        """A run of `model` on `device`; `changes` of the config."""
        config = dataclasses.replace(self.config, **changes)  # type: ignore[arg-type]
        return Run(config, self.workload(model), device, self.mesh if mesh is None else mesh, lambda line: None)


def attention_types(subject: Subject) -> list[torch.dtype]:
    """The type of matrix products in the training, which decides the kernel; and fp32."""
    return list(dict.fromkeys([torch.float32, Precision(subject.config.precision).products]))


def linear(weight: Tensor, bias: Tensor) -> Any:
    """What operations need of a `RowLinear`, with these tensors as they are."""
    layer: Any = functools.partial(F.linear, weight=weight, bias=bias)
    layer.weight, layer.bias, layer.out_features = weight, bias, len(weight)
    layer.product = functools.partial(F.linear, weight=weight)
    return layer


def layer_norm(weight: Tensor, bias: Tensor, eps: float = 1e-12) -> Any:
    """The same of a `LayerNorm`."""
    module = LayerNorm(len(weight), eps=eps, device="meta")
    norm: Any = functools.partial(functional_call, module, {"weight": weight, "bias": bias})
    norm.weight, norm.bias, norm.eps = weight, bias, eps
    return norm


def trained_steps(run: Run, trainer: Trainer, count: int) -> Iterator[int]:
    """Train `count` steps; yields after each."""
    for step in run.device.feed(trainer.dataloader.steps(0, count)):
        mine = (0,) * len(step.counts) if run.mesh.tensor_parallel_rank else step.counts
        trainer.train_step(step, run.mesh.sum_on_host(mine))
        run.device.finish_closures()
        yield step.index


def trainer_of(run: Run) -> Trainer:
    return Trainer(run, Interruptions(run.config.output_dir, is_root=False, watches_spot=False))


def fetch(device: Device, *tensors: Tensor) -> list[Tensor]:
    """Host copies."""
    copies = [device.host_memory(tensor) for tensor in tensors]
    device.copy_to_host([tensor.detach() for tensor in tensors], copies)
    return copies


def program(device: Device, module: nn.Module) -> Callable[..., Tensor]:
    """`module` as training on this device would run it: compiled if the device is set to compile."""
    return module if device.compiler is None else device.compiler.compile(module)


def relative_error(measured: Tensor, expected: Tensor) -> float:
    """The largest absolute error, divided by the largest absolute value expected."""
    expected = expected.double()
    error = (measured.double() - expected).abs().max().item()
    scale = expected.abs().max().item()
    return error / scale if scale else error


def differing(measured: Tensor, expected: Tensor) -> int:
    """Number of elements that are not equal; all if the shapes differ."""
    return int((measured != expected).sum()) if measured.shape == expected.shape else expected.numel()
