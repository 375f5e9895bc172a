"""Chunks of tensors loaded in threads, ahead of whoever writes them, in a few buffers that are used again and again.

Whole tensors would do, but each would be new memory, which the kernel hands out page by page, and would pass through
the processor's cache once for reading, hashing, adding up and writing each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.tensor_file import Spec

#: Each chunk costs a dozen handings-over between threads (docs/decisions.md has the sizes tried).
CHUNK_BYTES = 8 << 20
#: Batches that are being loaded, and batches that were handed out and may still be hashed.
_AHEAD, _BEHIND = 6, 4
#: Threads that read and hash files.
_LANES = 3


@dataclass(frozen=True)
class Chunk:
    """Some rows of a tensor: its part from `row` on, along the first axis."""

    name: str
    row: int
    #: Contiguous, on the CPU.
    rows: Tensor


class Lanes:
    """A few threads; what one lane is given is done in order, so that a file is read from its beginning to its end."""

    def __init__(self) -> None:
        self._pools = [ThreadPoolExecutor(1, thread_name_prefix="read") for _ in range(_LANES)]

    def __enter__(self) -> Lanes:
        return self

    def __exit__(self, *exception: object) -> None:
        for pool in self._pools:
            pool.shutdown(cancel_futures=True)

    def submit(self, lane: int, work: Callable[..., None], *arguments: Any) -> Future[None]:
        """Do `work` after what the lane was given before. It may wait for anything that was submitted earlier."""
        return self._pools[lane % _LANES].submit(work, *arguments)


#: Begins to fill the rows of a chunk; what it returns waits for that, and raises if something is wrong with them.
Load = Callable[[Chunk], Callable[[], None]]


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


def _placed(batch: list[tuple[str, int, tuple[int, ...]]], specs: Mapping[str, Spec], buffer: Tensor) -> list[Chunk]:
    """The chunks of a batch, their rows in `buffer`, one after the other."""
    chunks, at = [], 0
    for name, row, shape in batch:
        spec = Spec(specs[name].dtype, shape)
        if spec.bytes > CHUNK_BYTES:  # a single row; it is a batch of its own
            buffer = torch.empty(spec.bytes, dtype=torch.uint8)
        chunks.append(Chunk(name, row, buffer[at : at + spec.bytes].view(spec.dtype).view(shape)))
        at += _room(spec)
    return chunks


def loaded_ahead(specs: Mapping[str, Spec], load: Load, hasher: Executor) -> Iterator[Chunk]:
    """All chunks of `specs`, in order, filled by `load`.

    A chunk is the caller's until the next one. After that it still is the `hasher`'s, an executor with one thread,
    until that has done what it was given for the chunk.
    """
    buffers = [torch.empty(CHUNK_BYTES, dtype=torch.uint8) for _ in range(_AHEAD + _BEHIND)]
    in_use: dict[int, Future[None]] = {}
    waiting: deque[tuple[int, list[Chunk], Future[None]]] = deque()

    def hand_out() -> Iterator[Chunk]:
        slot, chunks, ready = waiting.popleft()
        ready.result()
        yield from chunks
        in_use[slot] = hasher.submit(_nothing)

    checker = ThreadPoolExecutor(1, thread_name_prefix="check")
    try:
        for at, batch in enumerate(_batches(specs)):
            if len(waiting) == _AHEAD:
                yield from hand_out()
            slot = at % len(buffers)
            if slot in in_use:
                in_use.pop(slot).result()
            chunks = _placed(batch, specs, buffers[slot])
            waiting.append((slot, chunks, checker.submit(_all, [load(chunk) for chunk in chunks])))
        while waiting:
            yield from hand_out()
    finally:
        checker.shutdown(cancel_futures=True)


def _nothing() -> None:
    pass


def _all(works: list[Callable[[], None]]) -> None:
    for work in works:
        work()
