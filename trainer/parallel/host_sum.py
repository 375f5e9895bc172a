"""The sum of a few integers over all hosts, after at most 2 + log2(n) messages in a row; gloo's ring has 2 (n - 1).

Recursive doubling (Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH",
2005, section 4.5): in round k, ranks that differ in bit k exchange what they have and add. Ranks beyond the largest
power of two give theirs to a partner first, and take the sum from it in the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Message(NamedTuple):
    """What a rank does in a round, with one other rank."""

    peer: int
    sends: bool
    receives: bool
    #: Whether what it receives is added to what it has; otherwise it replaces that.
    adds: bool


def messages(rank: int, size: int) -> Iterator[Message]:
    """The rounds of rank `rank` of `size`, in order."""
    power = 1 << (size.bit_length() - 1)
    beyond = size - power
    if rank >= power:
        yield Message(rank - power, sends=True, receives=False, adds=False)
        yield Message(rank - power, sends=False, receives=True, adds=False)
        return
    if rank < beyond:
        yield Message(rank + power, sends=False, receives=True, adds=True)
    for bit in range(power.bit_length() - 1):
        yield Message(rank ^ 1 << bit, sends=True, receives=True, adds=True)
    if rank < beyond:
        yield Message(rank + power, sends=True, receives=False, adds=False)


def sum_over_hosts(mine: Tensor, rank: int, size: int, group: dist.ProcessGroup | None) -> Tensor:
    """Element-wise sum of every rank's integers `mine` (N,), on all of them. All ranks call it at the same time."""
    total = mine
    for peer, sends, receives, adds in messages(rank, size):
        work, received = [], torch.empty_like(total)
        if receives:
            work.append(dist.irecv(received, peer, group))
        if sends:
            work.append(dist.isend(total, peer, group))
        for one in work:
            assert one is not None  # this rank is in the group
            one.wait()
        if receives:
            total = total + received if adds else received
    return total
