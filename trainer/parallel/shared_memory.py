"""Sums over workers of one machine through memory that they share: gloo sends every byte through a socket.

Each worker has a segment that the others of its group see: a place for what they are to sum, and one for its sums. A
tensor goes through them in pieces: every worker lays out its piece, all meet, every worker sums its share of the piece,
all meet again, and every worker takes the others' shares.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.parallel.plan import share

T = TypeVar("T")

#: Larger ones gain nothing, smaller ones wait more often for the others (docs/decisions.md).
PIECE_BYTES = 16 << 20
#: Of less, the two waits take as long as gloo.
LEAST_BYTES = 128 << 10


class SharedMemory:
    """The segments of a group's workers. All of them make it together, and together call `all_reduce`."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """`group`: torch.distributed's handle, None: all workers. Raises `OSError`, on every worker, where one of them
        cannot have another's segment."""
        self._group = group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._arrived = torch.zeros(1, dtype=torch.int64)
        if not hasattr(os, "memfd_create"):
            raise OSError("only Linux has memory without a name")
        own = os.memfd_create("bert-sums")
        try:
            os.ftruncate(own, 2 * PIECE_BYTES)
            segments: list[Tensor] = []
            problem = ""
            for pid, descriptor in all_gather_object((os.getpid(), own), group):
                try:
                    segments.append(_segment(f"/proc/{pid}/fd/{descriptor}"))
                except OSError as error:
                    problem = str(error)
            # Everybody has heard from everybody here, so nobody still needs the descriptor.
            problem = next(filter(None, all_gather_object(problem, group)), "")
        finally:
            os.close(own)
        if problem:
            raise OSError(problem)
        self._places = tuple(zip(*(segment.chunk(2) for segment in segments), strict=True))

    def all_reduce(self, tensor: Tensor, combine: Callable[..., object]) -> None:
        """Replace the contiguous `tensor` by what `combine(a, b, out=a)` makes of all workers', in an order fixed by
        its size and the workers."""
        for piece in tensor.view(-1).split(PIECE_BYTES // tensor.element_size()):
            self._reduce(piece, combine)

    def _reduce(self, piece: Tensor, combine: Callable[..., object]) -> None:
        # laid_out is written before a first meeting and read until the second, sums the other way round: so nobody
        # writes what another still reads, whatever the next piece's length.
        laid_out, sums = ([place[: piece.nbytes].view(piece.dtype) for place in places] for places in self._places)
        shares = [share(len(piece), rank, self._size) for rank in range(self._size)]
        own, others = self._rank, [rank for rank in range(self._size) if rank != self._rank]
        for rank in others:
            laid_out[own][shares[rank]].copy_(piece[shares[rank]])
        self._barrier()
        total = piece[shares[own]]
        for rank in others:
            combine(total, laid_out[rank][shares[own]], out=total)
        sums[own][shares[own]].copy_(total)
        self._barrier()
        for rank in others:
            piece[shares[rank]].copy_(sums[rank][shares[rank]])

    def _barrier(self) -> None:
        """Wait until all workers are here; what they wrote before, the others see after."""
        dist.all_reduce(self._arrived, group=self._group)


def all_gather_object(own: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """What each worker of a group gives as its `own`, by rank; None: of all workers."""
    found = [own] * dist.get_world_size(group)
    dist.all_gather_object(found, own, group=group)
    return found


def _segment(path: str) -> Tensor:
    """The (2 · PIECE_BYTES,) bytes of a segment; another process' while that has it open."""
    with open(path, "r+b", buffering=0) as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 2 * PIECE_BYTES), dtype=torch.uint8)
