"""Workers through torch_xla's own `xmp.spawn`, as in the DDP tutorial, rather than through torchrun."""

from __future__ import annotations

import os
from collections.abc import Callable

from trainer.errors import UserError
from trainer.process import free_port

#: Set in spawned workers.
_SPAWNED = "TRAINER_SPAWNED"


class _WorkerFailed(Exception):
    """A spawned worker's exit status, on its way to the process that spawned it."""


def is_spawned() -> bool:
    """Whether this process is a worker already."""
    return _SPAWNED in os.environ or "TORCHELASTIC_RUN_ID" in os.environ


def spawn(workers: int, device: str, main: Callable[[], int]) -> int:
    """Run `main`, the trainer, in so many processes of this machine; returns the first status that is not 0.

    Raises `UserError` where torch_xla's way of starting workers cannot work.
    """
    if device not in ("xla", "neuron"):
        raise UserError(
            f"--spawn starts workers of device xla or neuron, not {device}; use torchrun --nproc_per_node={workers}"
        )
    if device == "xla" and workers > 1:
        raise UserError(
            f"--spawn {workers} starts threads of one process on XLA's CPU, whose collectives time out; use torchrun "
            f"--nproc_per_node={workers}, whose workers are processes"
        )
    os.environ.setdefault("PJRT_DEVICE", "NEURON" if device == "neuron" else "CPU")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(free_port()))
    if device == "neuron":
        os.environ["NEURON_NUM_DEVICES"] = str(workers)
        from trainer.devices.neuron import load_runtime

        load_runtime()
    from trainer.devices.xla import spawn_workers

    try:
        spawn_workers(_work, main, single=workers == 1)
    except _WorkerFailed as failure:
        return int(failure.args[0])
    return 0


def _work(index: int, main: Callable[[], int]) -> None:
    from trainer.devices.xla import torchrun_variables

    os.environ[_SPAWNED] = "1"
    os.environ.update(torchrun_variables())
    status = main()
    if status:
        raise _WorkerFailed(status)
