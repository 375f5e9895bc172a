"""Device name → device."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from common.errors import UserError
from trainer import registry
from trainer.devices.base import Device, DeviceOptions
from trainer.models.operations import Operations
from trainer.parallel.mesh import Mesh


def select(name: str, mesh: Mesh, options: DeviceOptions) -> Device:
    """The device `name` for this worker; `auto`: as `automatic` chooses. Raises `UserError`.

    With the environment variable DISABLE_XLA set, `xla`, `neuron` and `neuron-xla` mean torch's own devices, as in
    Neuron's developer guide: a CPU on Trainium instances, a GPU where there is one.
    """
    if name in ("xla", "neuron", "neuron-xla") and os.environ.get("DISABLE_XLA"):
        if mesh.is_root:
            print(f"DISABLE_XLA={os.environ['DISABLE_XLA']}: device auto instead of {name}, without XLA", flush=True)
        name = "auto"
    if name == "auto":
        name = automatic(log=print if mesh.is_root else None)
    kind: type[Device] = registry.load(registry.DEVICES[name])
    if options.compile and kind.compiles_steps:
        raise UserError(f"compile is for cpu and cuda; device {name} always compiles: leave it off")
    device = kind.of(mesh, options)
    if options.compile:
        device.inductor = device.compiler(options.compile_cache)
        device.operations = Operations()  # torch.compile fuses these better than our own
    return device


def automatic(log: Callable[[str], None] | None = None) -> str:
    """The device that `auto` selects on this machine: cuda, else neuron, else cpu; never xla, which runs on the CPU.

    `log` gets a warning if there are NeuronCores but their packages are missing.
    """
    if torch.cuda.is_available():
        return "cuda"
    if os.environ.get("DISABLE_XLA"):
        return "cpu"
    from trainer.devices.neuron_lane import Installation, cores, require_xla_lane

    try:
        count = cores()
    except UserError:
        return "cpu"
    try:
        require_xla_lane(Installation.of_machine())
    except UserError as error:
        if log is not None:
            log(f"warning: device auto is the CPU, although there are {count} NeuronCores here: {error}")
        return "cpu"
    return "neuron"


def select_alone(name: str) -> Device:
    """The started device `name`, for a process without other workers. Raises `UserError`."""
    device = select(name, Mesh(), DeviceOptions())
    device.start(Mesh())
    return device
