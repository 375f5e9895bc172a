"""`python -m tests.helpers.recorder …`: the trainer on the CPU, where each worker saves what it drew at random.

random-<rank>.npz holds `keep/<call>`: which of the first `ELEMENTS` elements the run's call-th dropout kept; for each
update s (from 0) and parameter, `before/<s>/<name>` and `after/<s>/<name>`: stochastic rounding's input and output.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from torch import Tensor

from trainer.__main__ import main
from trainer.devices.cpu import CpuDevice
from trainer.devices.cpu_operations import CpuOperations
from trainer.loop import Trainer

ELEMENTS = 4096

_dropout, _round, _train = CpuOperations.dropout, CpuDevice.round_stochastically, Trainer.train
kept: list[np.ndarray] = []
rounded: list[tuple[Tensor, Tensor]] = []


def dropout(ops: CpuOperations, x: Tensor, p: float) -> Tensor:
    """The same mask is drawn twice: for ones, where only dropped elements are zero, and for `x`."""
    state = torch.get_rng_state()
    kept.append(_dropout(ops, torch.ones(x.shape), p).view(-1)[:ELEMENTS].numpy() > 0)
    torch.set_rng_state(state)
    return _dropout(ops, x, p)


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
    CpuOperations.dropout = dropout  # type: ignore[method-assign]
    CpuDevice.round_stochastically = round_stochastically  # type: ignore[method-assign]
    Trainer.train = train  # type: ignore[method-assign]
    sys.exit(main())
