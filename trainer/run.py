"""One training run: what is trained, with which options, on which device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainer.config import TrainConfig
from trainer.devices.base import Device
from trainer.parallel.mesh import Mesh
from trainer.registry import TENSORBOARD
from trainer.workloads.base import Workload


@dataclass(frozen=True)
class Run:
    """What every part of a trainer is built from."""

    config: TrainConfig
    workload: Workload
    device: Device
    mesh: Mesh
    #: Prints a line in the root worker; does nothing in the others.
    log: Callable[[str], None]
    #: The names of the trackers that show its curves.
    trackers: Sequence[str] = (TENSORBOARD,)

    @property
    def is_root(self) -> bool:
        """Whether this worker writes the run's files; no worker does in a trial."""
        return self.mesh.is_root and not self.config.trial
