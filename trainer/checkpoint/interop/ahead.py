"""Chunks of tensors loaded in a thread, ahead of whoever writes them, in a few buffers that are used again and again.

Whole tensors would do, but each would be new memory, which the kernel hands out page by page, and would pass through
the processor's cache once for reading, hashing, adding up and writing each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.checkpoint.tensor_file import Spec

CHUNK_BYTES = 4 << 20
#: Batches loaded and not yet written.
_AHEAD = 4


@dataclass(frozen=True)
class Chunk:
    """Some rows of a tensor: its part from `row` on, along the first axis."""

    name: str
    row: int
    #: Contiguous, on the CPU.
    rows: Tensor


def chunks_of(specs: Mapping[str, Spec]) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """(name, first row, shape) of the chunks of all tensors, in order; of an empty tensor one."""
    for name, spec in specs.items():
        rows, *rest = spec.shape
        each = max(1, CHUNK_BYTES // max(1, spec.bytes // max(1, rows)))
        for row in range(0, max(1, rows), each):
            yield name, row, (min(each, rows - row), *rest)


def _batches(specs: Mapping[str, Spec]) -> Iterator[list[tuple[str, int, tuple[int, ...]]]]:
    """The chunks of all tensors, small ones together: each handing over from one thread to another takes its time."""
    batch: list[tuple[str, int, tuple[int, ...]]] = []
    held_bytes = 0
    for name, row, shape in chunks_of(specs):
        size = _room(Spec(specs[name].dtype, shape))
        if batch and held_bytes + size > CHUNK_BYTES:
            yield batch
            batch, held_bytes = [], 0
        batch.append((name, row, shape))
        held_bytes += size
    if batch:
        yield batch


def _room(spec: Spec) -> int:
    """Bytes that a chunk takes in a buffer, where the next begins aligned."""
    return -(-spec.bytes // 64) * 64


def loaded_ahead(specs: Mapping[str, Spec], load: Callable[[str, int, Tensor], None]) -> Iterator[Chunk]:
    """All chunks of `specs`, in order, filled by `load(name, row, rows)`; each is the caller's until the next."""
    buffers = [torch.empty(CHUNK_BYTES, dtype=torch.uint8) for _ in range(_AHEAD + 1)]
    waiting: deque[Future[list[Chunk]]] = deque()

    def loaded(batch: list[tuple[str, int, tuple[int, ...]]], buffer: Tensor) -> list[Chunk]:
        chunks, at = [], 0
        for name, row, shape in batch:
            spec = Spec(specs[name].dtype, shape)
            if spec.bytes > CHUNK_BYTES:  # a single row; it is a batch of its own
                buffer = torch.empty(spec.bytes, dtype=torch.uint8)
            rows = buffer[at : at + spec.bytes].view(spec.dtype).view(shape)
            load(name, row, rows)
            chunks.append(Chunk(name, row, rows))
            at += _room(spec)
        return chunks

    pool = ThreadPoolExecutor(1, thread_name_prefix="load")
    try:
        for at, batch in enumerate(_batches(specs)):
            waiting.append(pool.submit(loaded, batch, buffers[at % len(buffers)]))
            if len(waiting) > _AHEAD:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
