"""Reads one worker's micro-batches in the order of the samples, a few steps ahead of the loop.

A: micro-steps in a step, B: samples in a micro-batch.
"""

from __future__ import annotations

import dataclasses
import json
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from common.files import disk_errors
from trainer.data.batch import Batch
from trainer.data.order import SampleOrder, Samples
from trainer.parallel.threads import use_one_core

#: Reads to stay ahead of the loop, each of one step or several small ones (`rows_at_once`).
_AHEAD = 2


@dataclass(frozen=True)
class Step:
    """One worker's share of one optimizer step, on the host."""

    #: Number of the step in the phase, from 0.
    index: int
    epoch: int
    micro_batches: Iterable[Batch]
    #: For each of the model's losses, how many terms it sums in all micro-batches; then the workload's other counts.
    counts: tuple[int, ...]
    #: Number of the batch in the data order, from 0.
    batch: int
    #: The addresses of the samples, in the order of use, (A·B,).
    samples: Samples
    #: A.
    micro_steps: int


class Reader(Protocol):
    """Reads samples as micro-batches."""

    #: Samples to read at once when steps are small, since one large read is cheaper than many small ones.
    rows_at_once: int

    def micro_batches(
        self, samples: Samples, size: int, *, step: int, epoch: int
    ) -> tuple[Sequence[Batch], Sequence[tuple[int, ...]]]:
        """The micro-batches of `samples`, in order, `size` each (the last may be smaller), and the counts of each: the
        number of terms of each loss, then the workload's other counts.

        `step`, `epoch`: of the first sample, from 0. Raises `UserError` on data that does not fit the model.
        """
        ...


class Loader:
    """Micro-batches for data-parallel rank `rank` of `size`.

    Micro-step u of rank r gets samples (u·size + r)·B … of the global batch: which samples share a micro-batch does
    not depend on the number of workers.
    """

    def __init__(
        self,
        reader: Reader,
        order: SampleOrder,
        *,
        micro_batch_size: int,
        rank: int = 0,
        size: int = 1,
        observe: Callable[[Step], None] | None = None,
        without_padding: bool = False,
    ) -> None:
        """`observe` is called by the reading thread with each step, before padding is removed from the micro-batches,
        if it is (`without_padding`)."""
        self._reader = reader
        self._order = order
        self._micro_batch_size = micro_batch_size
        self._observe = observe
        self._without_padding = without_padding
        self._rank, self._size = rank, size
        self._steps_at_once = max(1, reader.rows_at_once // (order.global_batch_size // size))

    def batch_of(self, step: int) -> int:
        """The number of the batch that step `step` uses."""
        return self._order.batch_of(step)

    def load(self, first: int, last: int) -> list[Step]:
        """This worker's share of steps `first` … `last` - 1."""
        sizes = [self._order.batch_size(step) for step in range(first, last)]
        starts = np.cumsum([0, *sizes])
        mine = [start + self._mine(size) for start, size in zip(starts[:-1], sizes, strict=True)]
        samples = self._order.steps(first, last)[np.concatenate(mine)]
        batches, counts = self._reader.micro_batches(
            samples, self._micro_batch_size, step=first, epoch=self._order.epoch_of(first)
        )
        steps, at = [], 0
        for step, rows in zip(range(first, last), map(len, mine), strict=True):
            micro_steps = rows // self._micro_batch_size
            share = slice(at // self._micro_batch_size, at // self._micro_batch_size + micro_steps)
            totals = tuple(map(sum, zip(*counts[share], strict=True)))
            where, batch = samples[slice(at, at + rows)], self._order.batch_of(step)
            found = Step(step, self._order.epoch_of(step), batches[share], totals, batch, where, micro_steps)
            if self._observe is not None:
                self._observe(found)
            if self._without_padding:
                unpadded = [one.without_padding() for one in found.micro_batches]
                found = dataclasses.replace(found, micro_batches=unpadded)
            steps.append(found)
            at += rows
        return steps

    def _mine(self, batch_size: int) -> NDArray[np.int64]:
        """The places of this worker's samples in a global batch."""
        index = np.arange(batch_size).reshape(-1, self._size, self._micro_batch_size)
        return index[:, self._rank].reshape(-1)

    def steps(self, first: int, last: int) -> Iterator[Step]:
        """Yield steps `first` … `last` - 1, which a thread reads ahead. Raises that thread's errors."""
        ahead: queue.Queue[list[Step] | BaseException] = queue.Queue(_AHEAD)
        stopped = threading.Event()
        starts = range(first, last, self._steps_at_once)

        def put(item: list[Step] | BaseException) -> None:
            while not stopped.is_set():
                try:
                    return ahead.put(item, timeout=0.1)
                except queue.Full:
                    continue

        def produce() -> None:
            try:
                use_one_core()
                for start in starts:
                    if stopped.is_set():
                        return
                    put(self.load(start, min(start + self._steps_at_once, last)))
            except BaseException as error:
                put(error)

        thread = threading.Thread(target=produce, name="loader", daemon=True)
        thread.start()
        try:
            for _ in starts:
                item = ahead.get()
                if isinstance(item, BaseException):
                    raise item
                yield from item
        finally:
            stopped.set()
            thread.join()


def record_samples(step: Step, path: Path) -> None:
    """Append the addresses of this worker's samples of `step` to the JSON Lines file `path`."""
    samples = np.stack([step.samples.shard, step.samples.row], axis=1)
    with disk_errors(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step.index, "samples": samples.tolist()}) + "\n")
