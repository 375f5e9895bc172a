"""Turns the order of samples into micro-batches of one worker, whole steps at a time, ahead of the loop.

A: micro-steps in a step, B: sequences in a micro-batch, S: tokens in a sequence, P: masked positions in one, at most.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

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
    micro_batches: list[BertBatch]
    #: Masked positions in all of them.
    masked_tokens: int
    #: Where the samples came from, in the order of use, (A·B,).
    samples: Samples


class BatchReader:
    """Reads rows, wherever they are, as micro-batches."""

    def __init__(self, shards: ShardSet, *, vocab_size: int, static_shapes: bool = False) -> None:
        """With `static_shapes` every micro-batch has B·P masked positions, the missing ones labelled `IGNORED`."""
        self._shards = shards
        self._vocab_size = vocab_size
        self._static_shapes = static_shapes

    def micro_batches(self, samples: Samples, size: int) -> tuple[list[BertBatch], int]:
        """`samples` in order, `size` at a time (the last may be smaller), and the masked positions in all of them.

        Raises `UserError` on an id outside the vocabulary.
        """
        arrays = self.read(samples)
        batches = [
            self._micro_batch({key: value[start : start + size] for key, value in arrays.items()})
            for start in range(0, len(samples), size)
        ]
        return batches, int(np.count_nonzero(arrays["masked_lm_positions"]))

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
        reader: BatchReader,
        order: SampleOrder,
        *,
        micro_batch_size: int,
        rank: int = 0,
        size: int = 1,
        prefetch_steps: int = 2,
    ) -> None:
        self._reader = reader
        self._order = order
        self._micro_batch_size = micro_batch_size
        self._prefetch_steps = prefetch_steps
        index = np.arange(order.global_batch_size).reshape(-1, size, micro_batch_size)
        self._mine = index[:, rank].reshape(-1)

    def load(self, step: int) -> Step:
        """This worker's share of step `step`."""
        samples = self._order.step(step)[self._mine]
        batches, masked_tokens = self._reader.micro_batches(samples, self._micro_batch_size)
        return Step(step, self._order.epoch_of(step), batches, masked_tokens, samples)

    def steps(self, first: int, last: int) -> Iterator[Step]:
        """Steps `first` … `last` - 1, read ahead by a thread; its errors are raised here."""
        ahead: queue.Queue[Step | BaseException] = queue.Queue(self._prefetch_steps)
        stopped = threading.Event()

        def put(item: Step | BaseException) -> None:
            while not stopped.is_set():
                try:
                    return ahead.put(item, timeout=0.1)
                except queue.Full:
                    continue

        def produce() -> None:
            try:
                for step in range(first, last):
                    if stopped.is_set():
                        return
                    put(self.load(step))
            except BaseException as error:
                put(error)

        thread = threading.Thread(target=produce, name="loader", daemon=True)
        thread.start()
        try:
            for _ in range(first, last):
                item = ahead.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
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
