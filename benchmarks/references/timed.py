"""`python -m trainer` with its parts timed: `-m benchmarks.references.timed DIRECTORY …`, then the trainer's options.

Each worker writes DIRECTORY/<rank>.json: for each step, the seconds from the end of the previous one to its own, and
how many of them went into which part; last, what came after the steps, and the better of the process's matrix rates
before and after training. `save` waits until the checkpoint is durable, so its seconds are the most that a checkpoint
can cost. Nothing is profiled; on the CPU an operation has ended when its call returns.
"""

from __future__ import annotations

import collections
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from trainer.__main__ import main as train
from trainer.checkpoint.manager import CheckpointManager
from trainer.devices.cpu import CpuDevice, matrix_flops_per_s
from trainer.loop import Trainer
from trainer.metrics.metrics import Metrics
from trainer.optim.adamw import AdamW
from trainer.optim.parameters import Parameters
from trainer.parallel.allreduce import AllReduceModel

#: The parts that make up the forward pass, the backward pass and the optimizer.
INSIDE = ("forward", "backward", "reduce", "optimizer")


#: Set in the environment if the matrix rate is wanted: torch's name of the type.
MATRIX_RATE = "BENCHMARK_MATRIX_RATE"
#: Side of the square matrices whose product shows what this machine can do, and how often it is run: 17 GFLOP each.
MATRIX = (2048, 12)


class Clock:
    def __init__(self) -> None:
        self.parts: dict[str, float] = collections.defaultdict(float)
        self.steps: list[dict[str, float]] = []
        self._ended = time.perf_counter()

    def part(self, owner: type, method: str, name: str) -> None:
        """Count the time that calls of a method take as part `name`."""
        original: Callable[..., Any] = getattr(owner, method)

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.parts[name] += time.perf_counter() - began

        setattr(owner, method, timed)

    def end_step(self) -> None:
        now = time.perf_counter()
        self.steps.append({"wall": now - self._ended, **self.parts})
        self.parts.clear()
        self._ended = now


def install(clock: Clock) -> None:
    clock.part(AllReduceModel, "__call__", "forward")
    clock.part(AllReduceModel, "backward", "backward")
    clock.part(Parameters, "reduce", "reduce")
    for owner, method in ((Parameters, "clip"), (AdamW, "step"), (Parameters, "zero_gradients")):
        clock.part(owner, method, "optimizer")
    clock.part(Metrics, "record", "logging")
    feed, train_step, save = CpuDevice.feed, Trainer.train_step, CheckpointManager.save

    def timed_feed(self: CpuDevice, steps: Iterator[Any]) -> Iterator[Any]:
        fed = feed(self, steps)
        while True:
            began = time.perf_counter()
            step = next(fed, None)
            clock.parts["data"] += time.perf_counter() - began
            if step is None:
                return
            yield step

    def timed_step(self: Trainer, *args: Any) -> bool:
        done = train_step(self, *args)
        clock.end_step()
        return done

    def durable_save(self: CheckpointManager, *args: Any) -> None:
        save(self, *args)
        self.finish()

    CpuDevice.feed, Trainer.train_step, CheckpointManager.save = timed_feed, timed_step, durable_save  # type: ignore
    clock.part(Trainer, "save", "save")


def matrix_rate() -> float:
    """FLOP/s of a large `mm` of the type that the environment names; 0 if it names none."""
    name = os.environ.get(MATRIX_RATE)
    return matrix_flops_per_s(*MATRIX, getattr(torch, name)) if name else 0.0


def main() -> int:
    directory = Path(sys.argv.pop(1))
    before = matrix_rate()
    clock = Clock()
    install(clock)
    status = train()
    last = {**clock.parts, "matrix_flops_per_s": max(before, matrix_rate())}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps([*clock.steps, last]))
    return status


if __name__ == "__main__":
    sys.exit(main())
