"""The compilers on this machine, which decide whether compiled graphs can be reused."""

from __future__ import annotations

import contextlib
import os
from importlib import metadata

from trainer.devices.neuron_cache import CC_FLAGS


def versions() -> dict[str, str]:
    """Versions of the packages that trace and compile graphs."""
    found = {}
    for package in ("torch", "torch-xla", "torch-neuronx", "neuronx-cc"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def flags(device: str) -> dict[str, str]:
    """The user's flags for Neuron's compiler, which are in the keys of its cache; none on other devices."""
    given = os.environ.get(CC_FLAGS, "") if device in ("neuron", "auto") else ""
    return {CC_FLAGS: given} if given else {}
