"""How the gradients of all workers become one sum: the two ways of data parallelism."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from torch import Tensor

from common.errors import UserError
from trainer.devices.base import Device
from trainer.models.base import Model
from trainer.optim.parameters import FlatParameters, Parameters, SeparateParameters, SharedModel
from trainer.parallel.ddp import DdpModel, DdpParameters
from trainer.parallel.mesh import Mesh
from trainer.precision import Precision
from trainer.workloads.base import Workload


class PlainModel:
    """A model's forward pass; gradients are summed by `Parameters.reduce`."""

    def __init__(self, model: Callable[..., tuple[Tensor, ...]]) -> None:
        self._model = model

    def __call__(self, batch: object) -> tuple[Tensor, ...]:
        return self._model(batch)

    def backward(self, loss: Tensor) -> None:
        """Add this micro-step's gradients to those of the step."""
        loss.backward()

    def micro_step(self, *, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """What forward and backward of a micro-step run in."""
        return contextlib.nullcontext()


def arrange(
    how: str,
    model: Model,
    workload: Workload,
    device: Device,
    mesh: Mesh,
    precision: Precision,
    shared: SharedModel | None,
) -> tuple[PlainModel | DdpModel, Parameters]:
    """The forward pass and the parameters of `model`, on its device, for `allreduce` or `ddp`; its weights get the type
    of `precision`. `shared`: the ranks that share the model, if it is not this one alone. Raises `UserError`."""
    extras = len(workload.losses)
    if how == "ddp":
        if not device.has_ddp:
            raise UserError(
                f"--data_parallel ddp: {device.describe()} has no collective operation that DDP can call while a "
                f"graph is recorded; use --data_parallel allreduce, or --device cpu"
            )
        parameters = DdpParameters(model, workload.has_weight_decay, extras, precision, shared)
        return DdpModel(model, mesh.data_parallel_group, parameters), parameters
    layout = SeparateParameters if device.compiles_steps else FlatParameters
    forward = model if device.inductor is None else device.inductor.compile(model)
    return PlainModel(forward), layout(model, workload.has_weight_decay, extras, precision, shared)
