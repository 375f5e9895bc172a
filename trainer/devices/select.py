"""Device name → device."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from common.errors import UserError
from trainer import registry
from trainer.devices.base import Device, DeviceOptions
from trainer.devices.neuron_lane import Installation, cores, lane_of, neuron_ls, require_lane
from trainer.parallel.mesh import Mesh


def select(name: str, mesh: Mesh, options: DeviceOptions) -> Device:
    """The device `name` for this worker. Raises `UserError`."""
    name = resolve(name, log=print if mesh.is_root else None)
    registry.require_device(
        name, data_parallel=options.data_parallel, tensor_parallel_size=mesh.tensor_parallel_size,
        compile=options.compile, shard_optimizer=options.shard_optimizer,
    )  # fmt: skip
    kind: type[Device] = registry.load(registry.DEVICES[name])
    device = kind.of(mesh, options)
    if options.compile:
        device.compiler = device.make_compiler(options.compile_cache)
        device.operations = device.compiled_operations
    return device


def resolve(name: str, log: Callable[[str], None] | None = None) -> str:
    """The registry's device that `name` stands for: for `auto` what `automatic` chooses, for `neuron` the lane that is
    installed. Raises `UserError` if none is.

    With the environment variable DISABLE_XLA set, what needs XLA means torch's own devices, as in Neuron's developer
    guide: a CPU on Trainium instances, a GPU where there is one. `neuron` needs XLA unless its native lane is here.
    """
    needs_xla = name in ("xla", "neuron-xla") or (name == "neuron" and not hasattr(torch, "neuron"))
    if needs_xla and os.environ.get("DISABLE_XLA"):
        if log is not None:
            log(f"DISABLE_XLA={os.environ['DISABLE_XLA']}: device auto instead of {name}, without XLA")
        name = "auto"
    if name == "auto":
        return automatic(log)
    return lane_of(Installation.of_machine())[0] if name == "neuron" else name


def automatic(log: Callable[[str], None] | None = None) -> str:
    """The device that `auto` selects on this machine: cuda, else a Neuron lane, else cpu; never xla, which is the CPU.

    `log` gets a warning if there are NeuronCores but their packages are missing, or `neuron-ls` does not answer.
    """
    if torch.cuda.is_available():
        return "cuda"
    if neuron_ls() is None or (os.environ.get("DISABLE_XLA") and not hasattr(torch, "neuron")):
        return "cpu"
    try:
        count = cores()
    except UserError as error:
        if log is not None:
            log(f"warning: device auto is the CPU: {error}")
        return "cpu"
    try:
        found = Installation.of_machine()
        lane, _ = lane_of(found)
        require_lane(found, lane)
    except UserError as error:
        if log is not None:
            log(f"warning: device auto is the CPU, although there are {count} NeuronCores here: {error}")
        return "cpu"
    return lane


def select_alone(name: str) -> Device:
    """The started device `name`, for a process without other workers. Raises `UserError`."""
    device = select(name, Mesh(), DeviceOptions())
    device.start(Mesh())
    return device
