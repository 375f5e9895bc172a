"""`python -m tests.helpers.recorder …`: the trainer on the CPU, where each worker saves what it drew at random.

random-<rank>.npz holds `keep/<call>`: the first `ELEMENTS` decisions of the run's call-th dropout; for each update s
(from 0) and parameter, `before/<s>/<name>` and `after/<s>/<name>`: stochastic rounding's input and output.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from torch import Tensor

from trainer.__main__ import main
from trainer.devices.cpu import CpuDevice
from trainer.devices.cpu_kernels import operators
from trainer.loop import Trainer

ELEMENTS = 4096

_dropped, _round, _train = operators.dropped, CpuDevice.round_stochastically, Trainer.train
kept: list[np.ndarray] = []
rounded: list[tuple[Tensor, Tensor]] = []


def dropped(p: float) -> tuple[int, int]:
    """What decides a call of a kernel with dropout; shown by the one that does nothing else."""
    decision = _dropped(p)
    kept.append(operators.scaled_or_zero(torch.ones(ELEMENTS), decision).numpy() > 0)
    return decision


def round_stochastically(device: CpuDevice, x: Tensor) -> Tensor:
    rounded.append((x.clone(), _round(device, x)))
    return rounded[-1][1]


def train(trainer: Trainer) -> bool:
    done = _train(trainer)
    found = {f"keep/{call}": mask for call, mask in enumerate(kept)}
    groups = trainer.parameters.groups
    for call in range(0, len(rounded), len(groups)):
        calls = rounded[call : call + len(groups)]
        for side, name in enumerate(("before", "after")):
            for parameter, values in trainer.parameters.named([[both[side]] for both in calls]):
                found[f"{name}/{call // len(groups)}/{parameter}"] = values.numpy()
    np.savez(trainer.config.output_dir / f"random-{trainer.mesh.rank}.npz", **found)
    return done


if __name__ == "__main__":
    operators.dropped = dropped
    CpuDevice.round_stochastically = round_stochastically  # type: ignore[method-assign]
    Trainer.train = train  # type: ignore[method-assign]
    sys.exit(main())
