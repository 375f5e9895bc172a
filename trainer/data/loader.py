"""Turns the order of samples into micro-batches of one worker, whole steps at a time, ahead of the loop.

A: micro-steps in a step, B: sequences in a micro-batch, S: tokens in a sequence, P: masked positions in one, at most.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.data.batch import Batch
from trainer.data.order import SampleOrder, Samples
from trainer.data.shards import KEYS, ShardSet
from trainer.errors import UserError
from trainer.files import disk_errors
from trainer.models.bert import IGNORED, BertBatch


@dataclass(frozen=True)
class Step:
    """One worker's share of one optimizer step, on the host."""

    #: Steps done before this one in the phase.
    index: int
    epoch: int
    micro_batches: Iterable[Batch]
    #: What each of the model's losses is a sum over, in all micro-batches: numbers of labels.
    counts: tuple[int, ...]
    #: Where the samples came from, in the order of use, (A·B,).
    samples: Samples


class Reader(Protocol):
    """Reads samples, wherever they are, as micro-batches."""

    #: Samples that are read together when steps are small: one read of many costs less than many reads.
    rows_at_once: int

    def micro_batches(self, samples: Samples, size: int) -> tuple[Sequence[Batch], Sequence[tuple[int, ...]]]:
        """`samples` in order, `size` at a time (the last may be smaller), and what each one's losses are sums over.

        Raises `UserError` on data that the model cannot take.
        """
        ...


class BatchReader:
    """Reads BERT's examples from shards."""

    rows_at_once = 1

    def __init__(self, shards: ShardSet, *, vocab_size: int, static_shapes: bool = False) -> None:
        """With `static_shapes` every micro-batch has B·P masked positions, the missing ones labelled `IGNORED`."""
        self._shards = shards
        self._vocab_size = vocab_size
        self._static_shapes = static_shapes

    def micro_batches(self, samples: Samples, size: int) -> tuple[list[BertBatch], list[tuple[int, int]]]:
        """See `Reader`; the losses are sums over masked positions and over sequences.

        Raises `UserError` on an id outside the vocabulary.
        """
        arrays = self.read(samples)
        parts = [
            {key: value[start : start + size] for key, value in arrays.items()}
            for start in range(0, len(samples), size)
        ]
        counts = [
            (int(np.count_nonzero(part["masked_lm_positions"])), len(part["masked_lm_positions"])) for part in parts
        ]
        return list(map(self._micro_batch, parts)), counts

    def read(self, samples: Samples) -> dict[str, NDArray[np.generic]]:
        """The rows of `samples`, in their order, from as few reads as there are shards among them."""
        by_shard = np.argsort(samples.shard, kind="stable")
        shards, starts = np.unique(samples.shard[by_shard], return_index=True)
        pieces = [
            self._shards.read(int(shard), samples.row[where])
            for shard, where in zip(shards, np.split(by_shard, starts[1:]), strict=True)
        ]
        back = np.empty(len(samples), dtype=np.int64)
        back[by_shard] = np.arange(len(samples))
        arrays = {key: np.concatenate([piece[key] for piece in pieces])[back] for key in KEYS}
        for key in ("input_ids", "masked_lm_ids"):
            largest = int(arrays[key].max())
            if largest >= self._vocab_size:
                row = int(arrays[key].max(axis=1).argmax())
                name, at = self._shards.names[samples.shard[row]], samples.row[row]
                raise UserError(
                    f"{name}: {key} of row {at} holds id {largest}, but the model's vocabulary has {self._vocab_size}; "
                    f"use the model the data was made for, or the data made for the model"
                )
        return arrays

    def _micro_batch(self, arrays: dict[str, NDArray[np.generic]]) -> BertBatch:
        seq_len = arrays["input_ids"].shape[1]
        positions = arrays["masked_lm_positions"].astype(np.int64)
        index = positions + seq_len * np.arange(len(positions))[:, None]
        labels = arrays["masked_lm_ids"].astype(np.int64)
        if self._static_shapes:
            labels[positions == 0] = IGNORED
        else:
            # Position 0 is [CLS], which is never masked: it marks the unused entries (NVIDIA's format).
            index, labels = index[positions > 0], labels[positions > 0]
        return BertBatch(
            input_ids=as_int64(arrays["input_ids"]),
            segment_ids=as_int64(arrays["segment_ids"]),
            input_mask=as_int64(arrays["input_mask"]),
            masked_index=torch.from_numpy(index.reshape(-1)),
            masked_labels=torch.from_numpy(labels.reshape(-1)),
            next_sentence_labels=as_int64(arrays["next_sentence_labels"]),
        )


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
        prefetch: int = 2,
    ) -> None:
        """`prefetch`: reads to be ahead by, each of one step, or of as many small ones as the reader likes."""
        self._reader = reader
        self._order = order
        self._micro_batch_size = micro_batch_size
        self._prefetch = prefetch
        index = np.arange(order.global_batch_size).reshape(-1, size, micro_batch_size)
        self._mine = index[:, rank].reshape(-1)
        self._steps_at_once = max(1, reader.rows_at_once // len(self._mine))

    def load(self, first: int, last: int) -> list[Step]:
        """This worker's share of steps `first` … `last` - 1."""
        rows = len(self._mine)
        offsets = self._order.global_batch_size * np.arange(last - first)[:, None]
        samples = self._order.steps(first, last)[(offsets + self._mine).reshape(-1)]
        batches, counts = self._reader.micro_batches(samples, self._micro_batch_size)
        micro_steps = rows // self._micro_batch_size
        steps = []
        for at, step in enumerate(range(first, last)):
            mine = slice(at * micro_steps, (at + 1) * micro_steps)
            totals = tuple(map(sum, zip(*counts[mine], strict=True)))
            where = samples[slice(at * rows, (at + 1) * rows)]
            steps.append(Step(step, self._order.epoch_of(step), batches[mine], totals, where))
        return steps

    def steps(self, first: int, last: int) -> Iterator[Step]:
        """Steps `first` … `last` - 1, read ahead by a thread; its errors are raised here."""
        ahead: queue.Queue[list[Step] | BaseException] = queue.Queue(self._prefetch)
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


def as_int64(array: NDArray[np.generic]) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int64))


def record_samples(step: Step, path: Path) -> None:
    """Append where the samples of this worker's share of `step` came from to the JSON lines in `path`."""
    samples = np.stack([step.samples.shard, step.samples.row], axis=1)
    with disk_errors(path), path.open("a") as file:
        file.write(json.dumps({"step": step.index, "samples": samples.tolist()}) + "\n")
