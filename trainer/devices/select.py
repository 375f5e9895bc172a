"""Which device a name means."""

from __future__ import annotations

import os

import torch

from trainer.devices.base import Device, DeviceOptions
from trainer.devices.inductor import Inductor
from trainer.errors import UserError
from trainer.models.operations import Operations
from trainer.parallel.mesh import Mesh


def select(name: str, mesh: Mesh, options: DeviceOptions) -> Device:
    """The device called `name` for this worker; `auto` is the fastest there is. Raises `UserError`.

    With the environment variable DISABLE_XLA set, `xla` and `neuron` mean torch's own devices, as in Neuron's developer
    guide: a CPU on Trainium instances, a GPU where there is one.
    """
    if name in ("xla", "neuron") and os.environ.get("DISABLE_XLA"):
        if mesh.is_root:
            print(f"DISABLE_XLA={os.environ['DISABLE_XLA']}: device auto instead of {name}, without XLA", flush=True)
        name = "auto"
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if options.compile and name in ("xla", "neuron"):
        raise UserError(f"compile is for cpu and cuda; device {name} compiles every step by itself: leave it off")
    if name == "cuda":
        from trainer.devices.cuda import CudaDevice

        return _compiling(CudaDevice(mesh.local_rank), options)
    if name == "xla":
        from trainer.devices.xla import XlaDevice

        return XlaDevice(options)
    if name == "neuron":
        from trainer.devices.neuron import NeuronDevice

        return NeuronDevice(mesh, options)
    assert name == "cpu", name
    from trainer.devices.cpu import CpuDevice

    return _compiling(CpuDevice(mesh.local_world_size, options.threads), options)


def select_alone(name: str) -> Device:
    """The device called `name`, started, for a process that computes without other workers. Raises `UserError`."""
    device = select(name, Mesh(), DeviceOptions())
    device.start(Mesh())
    return device


def _compiling(device: Device, options: DeviceOptions) -> Device:
    """The device, with torch.compile where it is asked for."""
    if options.compile:
        device.inductor = Inductor(options.compile_cache, needs_cxx=device.backend == "gloo")
        device.operations = Operations()  # its kernels are better fused than ours
    return device
