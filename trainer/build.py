"""Builds the parts of a trainer for one run."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor

from trainer.checkpoint.format import MASTER
from trainer.checkpoint.load import load_into
from trainer.checkpoint.resume_point import ResumePoint
from trainer.config import TrainConfig
from trainer.data.loader import Loader
from trainer.data.order import SampleOrder
from trainer.devices.base import Device
from trainer.metrics.plateau import Doctor
from trainer.models.base import Model
from trainer.optim.parameters import FlatParameters, Parameters, SeparateParameters
from trainer.optim.schedule import learning_rate
from trainer.optim.select import Optimizer, make_optimizer, separates_matrices
from trainer.optim.sharing import Replicas, SharedModel
from trainer.optim.zero import ShardedParameters
from trainer.parallel.allreduce import AllReduceModel
from trainer.parallel.ddp import DdpModel, DdpParameters
from trainer.parallel.mesh import Mesh
from trainer.parallel.plan import split_axis
from trainer.parallel.tensor import TensorParallel
from trainer.precision import Precision
from trainer.registry import stable_steps
from trainer.run import Run
from trainer.state import TrainState
from trainer.workloads.base import MASKED_LM_LOSS

#: How many workers of a machine may hold a copy of the model in host memory at the same time while loading.
LOADING_AT_ONCE = 8


def build_tensor_parallel(device: Device, mesh: Mesh) -> TensorParallel:
    """This worker's rank among those that share its copy of the model."""
    return TensorParallel(
        mesh.tensor_parallel_rank,
        mesh.tensor_parallel_size,
        lambda tensors, sums: device.all_reduce(tensors, mesh.tensor_parallel_group, sums=sums),
        device.random_region,
    )


def build_dataloader(run: Run, precision: Precision, state: TrainState, doctor: Doctor | None) -> Loader:
    """This worker's share of all batches that `state` does not skip; `doctor` observes it."""
    config, mesh, without_padding = run.config, run.mesh, run.device.needs_no_padding(precision)
    order = SampleOrder(run.workload.rows_per_shard, seed=config.seed, sizes=state.batch_sizes(), skipped=state.skipped)
    return Loader(
        run.workload.reader(
            static_shapes=run.device.static_shapes,
            without_padding=without_padding,
            seed=config.seed,
            falling=mask_rate_steps(config),
        ),
        order,
        micro_batch_size=config.micro_batch_size,
        rank=mesh.data_parallel_rank,
        size=mesh.data_parallel_size,
        observe=None if doctor is None else doctor.observe,
        without_padding=without_padding,
    )


def mask_rate_steps(config: TrainConfig) -> range:
    """The steps in which the masking rate falls: those of the decay, or all if no part of the schedule is stable."""
    stable = stable_steps(config.schedule, max_steps=config.max_steps, decay_share=config.decay_share)
    return range(stable, config.max_steps)


def build_model(
    run: Run, state: TrainState, start: ResumePoint | None, precision: Precision, tensor_parallel: TensorParallel
) -> Model:
    """The model on its device, with initial weights or those of `start`. Raises `CheckpointError`."""
    built: list[Model] = []

    def build() -> None:
        model = run.workload.make_model(run.device.operations, tensor_parallel)
        if start is None:
            run.workload.initialise(model, run.config.seed)
        else:
            state.require_same_model(start.state, start.checkpoint)
            model.to(precision.dtype)  # before loading: fp64 weights would be rounded to fp32
            load_into(dict(model.named_parameters()), start, "model", run.workload.vocab_size, tensor_parallel)
            if start.weights_only and (line := run.workload.begin_phase(model, start.state.settings)):
                run.log(line)
        built.append(model.to(run.device.torch_device, precision.dtype).train())
        run.device.finish_closures()  # until then a lazy device keeps the host's copy

    run.mesh.in_turns(build, at_once=LOADING_AT_ONCE)
    return built[0]


def build_parameters(
    run: Run, model: Model, precision: Precision, tensor_parallel: TensorParallel
) -> tuple[AllReduceModel | DdpModel, Parameters]:
    """The forward pass and the parameters of `model`, for `--data_parallel`; its weights are converted to the type that
    `precision` computes with."""
    device, has_weight_decay, extras = run.device, run.workload.has_weight_decay, len(run.workload.losses)
    group = run.mesh.data_parallel_group
    replicas = Replicas(
        run.mesh.data_parallel_rank, group.size, lambda tensors: device.all_reduce(tensors, group),
        lambda tensors: device.broadcast(tensors, group),
    )  # fmt: skip
    is_matrix = run.workload.is_hidden_matrix if separates_matrices(run.config.optimizer) else lambda name: False
    if run.config.data_parallel == "ddp":
        ddp = DdpParameters(model, has_weight_decay, extras, precision, None, replicas, is_matrix)
        return DdpModel(model, group, ddp), ddp
    shared = None
    if tensor_parallel.size > 1:
        shared = SharedModel(
            tensor_parallel.rank, tensor_parallel.size, split_axis, tensor_parallel.reduce_in_place,
            tensor_parallel.region,
        )  # fmt: skip
    layout: type[Parameters] = SeparateParameters if device.compiles_steps else FlatParameters
    if run.config.shard_optimizer:
        layout = ShardedParameters
    forward = model if device.compiler is None else device.compiler.compile(model)
    return AllReduceModel(forward), layout(model, has_weight_decay, extras, precision, shared, replicas, is_matrix)


def build_optimizer(run: Run, parameters: Parameters, number: Callable[[float], float | Tensor]) -> Optimizer:
    """`number`: moves a number that changes at every step to the device."""
    return make_optimizer(
        run.config.optimizer,
        parameters,
        weight_decay=run.config.weight_decay,
        adamw_lr_ratio=run.config.adamw_lr_ratio,
        number=number if run.device.compiles_shapes else None,
    )


def checkpoint_tensors(
    model: Model, parameters: Parameters, optimizer: Optimizer
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The model's tensors, and the optimizer's that this worker keeps, under their names in checkpoints; later steps
    change them."""
    masters = {f"{MASTER}.{name}": tensor for name, tensor in parameters.masters().items()}
    return dict(model.named_parameters()), optimizer.state() | masters


def build_lr_schedule(config: TrainConfig) -> Callable[[int], float]:
    """The learning rate of the next update, as a function of the phase's finished steps."""
    return functools.partial(
        learning_rate, config.schedule, peak=config.lr, warmup_steps=config.warmup_steps, max_steps=config.max_steps,
        decay_share=config.decay_share,
    )  # fmt: skip


def build_doctor(run: Run, model: Model, parameters: Parameters) -> Doctor | None:
    """What watches the masked-LM loss, in the root worker; None in others, or without such a loss."""
    if not run.is_root or MASKED_LM_LOSS not in run.workload.losses:
        return None
    weights = parameters.masters() or dict(model.named_parameters())
    matrices = {name: tensor for name, tensor in weights.items() if run.workload.is_hidden_matrix(name)}
    # On a device that compiles, every look at the weights would compile another graph.
    readable = None if run.device.compiles_shapes else matrices
    return Doctor(run.config, run.workload.vocab_size, readable, are_masked=run.workload.masking is None)
