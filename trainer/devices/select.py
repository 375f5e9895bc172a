"""Which device a name means."""

from __future__ import annotations

import os

import torch

from trainer.devices.base import Device
from trainer.parallel.mesh import Mesh


def select(name: str, mesh: Mesh) -> Device:
    """The device called `name` for this worker; `auto` is the fastest there is."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        from trainer.devices.cuda import CudaDevice

        return CudaDevice(mesh.local_rank)
    assert name == "cpu", name
    from trainer.devices.cpu import CpuDevice

    return CpuDevice(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
