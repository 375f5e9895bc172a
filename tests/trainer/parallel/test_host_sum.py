"""The sum that hosts compute: every rank gets it, in few rounds, whatever the number of ranks."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.helpers.support import all_end
from trainer.parallel.host_sum import messages
from trainer.parallel.mesh import Mesh


def simulate(size: int) -> tuple[list[float], int]:
    """What each rank holds at the end if rank r begins with 3^r modulo a prime, and the longest chain of messages that
    wait for one another. A message is delivered when both sides have reached it; waiting forever is a deadlock."""
    values = [pow(3, rank, 1_000_003) for rank in range(size)]
    rounds = [list(messages(rank, size)) for rank in range(size)]
    at, depth = [0] * size, [0] * size
    waiting = [rank for rank in range(size) if rounds[rank]]
    while waiting:
        moved = set[int]()
        for rank in waiting:
            if at[rank] == len(rounds[rank]) or rank in moved:
                continue
            mine = rounds[rank][at[rank]]
            if at[mine.peer] == len(rounds[mine.peer]):
                continue
            theirs = rounds[mine.peer][at[mine.peer]]
            if theirs.peer != rank or mine.peer in moved:
                continue
            assert (mine.sends, mine.receives) == (theirs.receives, theirs.sends)
            before = values[rank], values[mine.peer]
            for one, message, other in ((rank, mine, before[1]), (mine.peer, theirs, before[0])):
                if message.receives:
                    values[one] = values[one] + other if message.adds else other
                at[one] += 1
            depth[rank] = depth[mine.peer] = max(depth[rank], depth[mine.peer]) + 1
            moved |= {rank, mine.peer}
        assert moved, f"deadlock of {len(waiting)} ranks"
        waiting = [rank for rank in waiting if at[rank] < len(rounds[rank])]
    return values, max(depth)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 9, 31, 64, 100, 2048, 2047, 2049])
def test_every_rank_has_the_sum_after_few_messages(size: int) -> None:
    """2,048 ranks: 11 messages in a row, where a ring has 4,094."""
    values, depth = simulate(size)
    assert set(values) == {sum(pow(3, rank, 1_000_003) for rank in range(size))}
    assert depth <= math.floor(math.log2(size)) + (0 if size & (size - 1) == 0 else 2)


def _sum(rank: int, port: int, size: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    mesh = Mesh(rank=rank, local_rank=rank, world_size=size, local_world_size=size).connect("gloo", 60)
    rng = np.random.default_rng(5)
    for _ in range(50):
        numbers = rng.integers(-(2**40), 2**40, (size, 7))
        expected = torch.tensor(numbers[rank])
        dist.all_reduce(expected)  # gloo's own
        assert mesh.sum_on_host(numbers[rank].tolist()) == expected.tolist() == numbers.sum(axis=0).tolist()
    mesh.disconnect()


@pytest.mark.parametrize("size", [2, 3, 6])
def test_it_is_gloos_own_sum(size: int) -> None:
    all_end(_sum, size, size)
