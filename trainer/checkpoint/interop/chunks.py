"""Tensors in chunks of a few MB: a thread reads and checks ahead while the caller hashes and writes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.checkpoint.tensor_file import Spec

#: Small enough for the CPU caches, large enough to amortize the handover between threads (docs/decisions.md).
CHUNK_BYTES = 8 << 20
#: Chunks read ahead of the caller.
_AHEAD = 2


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of a tensor, starting at `row` of its first axis."""

    name: str
    row: int
    #: Contiguous, on the CPU.
    rows: Tensor


def chunks_of(specs: Mapping[str, Spec]) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """(name, first row, shape) of every chunk of every tensor, in order; an empty tensor has one chunk."""
    for name, spec in specs.items():
        rows, *rest = spec.shape
        rows_per_chunk = max(1, CHUNK_BYTES // max(1, spec.bytes // max(1, rows)))
        for row in range(0, max(1, rows), rows_per_chunk):
            yield name, row, (min(rows_per_chunk, rows - row), *rest)


def read_ahead(specs: Mapping[str, Spec], fill: Callable[[Chunk], None]) -> Iterator[Chunk]:
    """Yield all chunks of `specs`, in order.

    `fill` sets a chunk's rows; one other thread calls it, in order, and its exceptions are raised here.
    """

    def filled(name: str, row: int, shape: tuple[int, ...]) -> Chunk:
        chunk = Chunk(name, row, torch.empty(shape, dtype=specs[name].dtype))
        fill(chunk)
        return chunk

    pending: deque[Future[Chunk]] = deque()
    reader = ThreadPoolExecutor(1, thread_name_prefix="read")
    try:
        for place in chunks_of(specs):
            pending.append(reader.submit(filled, *place))
            if len(pending) > _AHEAD:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        reader.shutdown(cancel_futures=True)
