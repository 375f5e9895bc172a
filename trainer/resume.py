"""Loads what a run starts from: its own checkpoint, or (phase 2) the weights of phase 1."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from common.errors import CheckpointError
from trainer.checkpoint.format import MASTER, has_master, read_tensors, tensor_file
from trainer.checkpoint.resume_point import ResumePoint
from trainer.config import TrainConfig, deciding
from trainer.data.order import ORDER_VERSION
from trainer.devices.base import Device
from trainer.parallel.mesh import Mesh
from trainer.parallel.shares import put_piece, put_share, whole_shape, without_padding
from trainer.parallel.tensor import TensorParallel
from trainer.state import TrainState
from trainer.workloads.base import Workload


def deciding_settings(config: TrainConfig) -> dict[str, Any]:
    """What of the configuration decides the result and is no field of `TrainState`, where `auto` is resolved."""
    own = {field.name for field in dataclasses.fields(TrainState)} - {"micro_batch_size"}
    return {name: value for name, value in deciding(config).items() if name not in own}


def beginning(
    config: TrainConfig,
    workload: Workload,
    mesh: Mesh,
    start: ResumePoint | None,
    *,
    data: str,
    precision: str,
    skipped: Sequence[int],
) -> TrainState:
    """The state before the first step of a phase."""
    return TrainState(
        phase=config.phase,
        step=0,
        global_step=config.phase1_end_step,
        samples_consumed=0,
        epoch=0,
        seed=config.seed,
        global_batch_size=config.global_batch_size(mesh.data_parallel_size),
        data=data,
        order_version=ORDER_VERSION,
        optimizer=config.optimizer,
        precision=precision,
        model=workload.describe(),
        data_parallel_size=mesh.data_parallel_size,
        tensor_parallel_size=mesh.tensor_parallel_size,
        micro_batch_size=config.micro_batch_size,
        torch_version=torch.__version__,
        settings=deciding_settings(config),
        origin="" if start is None else start.origin,
        skipped=sorted(skipped),
    )


def resume_state(state: TrainState, start: ResumePoint, config: TrainConfig, say: Callable[[str], None]) -> TrainState:
    """`state` at the place of `start`, with the changes that the configuration allows, which are told.

    Raises `CheckpointError` if anything else that decides the result differs.
    """
    resumed = state.resumed(start.state, start.checkpoint, allowed=config.allow_changes)
    for change in resumed.changes[len(start.state.changes) :]:
        say(f"from step {change['step']} on: {change['name']} {change['old']} → {change['new']}, as allowed")
    return resumed


def data_identity(config: TrainConfig, workload: Workload, say: Callable[[str], None]) -> str:
    """Nothing is resumed after a trial, and the data may be large."""
    return "" if config.trial else workload.identity(config.output_dir, say)


def resolve_precision(
    config: TrainConfig, device: Device, resumed: TrainState | None, say: Callable[[str], None]
) -> str:
    if config.wanted_precision != "auto":
        if config.precision == "auto":
            say(f"precision {config.wanted_precision}: optimizer {config.optimizer} is made for it")
        return config.wanted_precision
    if resumed is not None and resumed.phase == config.phase:
        return resumed.precision
    name, reason = device.automatic_precision()
    say(f"precision {name}: {reason}")
    return name


@torch.no_grad()
def load_into(
    targets: dict[str, Tensor], start: ResumePoint, kind: str, vocab_size: int, ranks: TensorParallel
) -> None:
    """Copy the tensors of a checkpoint's `kind` (model, optimizer) into `targets` of the same names: this rank's share
    of them. Weights are the master copy's where there is one, which is no part of the optimizer here.

    Raises `CheckpointError` naming the first tensor that is missing, too much, or of another shape.
    """
    if not targets:  # an optimizer that remembers nothing
        return
    path, size = start.checkpoint, start.state.tensor_parallel_size
    if size not in (1, ranks.size):
        raise CheckpointError(
            f"{path} is split over {size} tensor-parallel ranks, this run has {ranks.size}; make it fit: "
            f"python -m stages.convert {path} OUT --to native --tensor-parallel-size {ranks.size}"
        )
    rank = 0 if size == 1 else ranks.rank
    file, prefix = path / tensor_file(kind, rank, size), ""
    if kind == "model" and has_master(path / tensor_file("optimizer", rank, size)):
        file, prefix = path / tensor_file("optimizer", rank, size), f"{MASTER}."
    if not file.exists():
        raise CheckpointError(
            f"{path} has no {file.name} (saved with --minimal_ckpt?): the next phase can start from its weights, but "
            f"this one cannot be resumed; train it anew in another --output_dir"
        )
    missing = set(targets)
    for stored, tensor in read_tensors(file, lambda name: name.startswith(f"{MASTER}.") is bool(prefix)):
        name = stored.removeprefix(prefix)
        if name not in targets:
            raise CheckpointError(f"{file} holds {name}, which this run has no place for; is it of another model?")
        target = targets[name]
        whole = whole_shape(name, tuple(target.shape), vocab_size, ranks.size)
        needed = whole if size == 1 else tuple(without_padding(name, target, vocab_size, ranks).shape)
        if tuple(tensor.shape) != needed:
            raise CheckpointError(
                f"{file}: {name} has shape {tuple(tensor.shape)}, this run needs {needed}; is it of another model?"
            )
        if size == 1:
            put_share(target, name, tensor, ranks)
        else:
            put_piece(target, name, tensor)
        missing.discard(name)
    if missing:
        raise CheckpointError(f"{file} lacks {sorted(missing)[0]}; is it of another model?")


def say_start(start: ResumePoint | None, state: TrainState, say: Callable[[str], None]) -> None:
    """Tell where the run begins."""
    if start is None:
        say(f"starting phase {state.phase} at step 0 with initial weights")
    elif start.weights_only:
        say(f"starting phase {state.phase} at step {state.global_step} with the weights of {start.checkpoint}")
    else:
        say(f"resuming from checkpoint {start.checkpoint} at step {state.global_step}")
