"""Workers take turns, and reduce tensors together."""

from __future__ import annotations

import dataclasses
import errno
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from common.process import free_port
from tests.helpers.support import FORKS
from trainer.devices.cpu import CpuDevice
from trainer.parallel import shared_memory
from trainer.parallel.mesh import Mesh
from trainer.parallel.shared_memory import PIECE_BYTES


def _start(rank: int, port: int, log: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="5")
    mesh = dataclasses.replace(Mesh(), rank=rank, local_rank=rank, world_size=5, local_world_size=5).connect("gloo", 60)

    def work() -> None:
        for word in ("in", "out"):
            with open(log, "a") as file:
                file.write(f"{word} {rank}\n")
            time.sleep(0.05)

    mesh.in_turns(work, at_once=2)
    mesh.disconnect()


def _all_end(target: Callable[..., None], count: int, *arguments: str) -> None:
    """Run `target(rank, port, …)` in so many processes, all of which must end well."""
    port = free_port()
    workers = [FORKS.Process(target=target, args=(rank, port, *arguments)) for rank in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0


#: Of double precision: small; large for gloo; several pieces for shared memory, the last one short; middling.
SHAPES = [(5,), ((1 << 20) + 1,), (2 * PIECE_BYTES // 8 + 100_001,), (2, 3), (30_011,)]


def _reduce(rank: int, port: int, how: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="3")
    on_a_machine = 1 if how == "machines" else 3
    mesh = dataclasses.replace(Mesh(), rank=rank, local_rank=rank, world_size=3, local_world_size=on_a_machine)
    if how == "refused" and rank == 1:
        shared_memory._segment = _refuse
    mesh = mesh.connect("gloo", 60)
    group = mesh.data_parallel_group
    assert (group.links.shared_memory is not None) is (how == "shared")
    assert ("Permission denied" in mesh.not_shared) is (how == "refused"), mesh.not_shared
    tensors = [[torch.from_numpy(np.random.default_rng(r).integers(-99, 99, s)) for s in SHAPES] for r in range(3)]
    chance = random.Random(rank)
    for sums, combined in ((True, np.sum), (False, np.max)):
        expected = [combined([t.numpy() for t in each], axis=0) for each in zip(*tensors, strict=True)]
        for _ in range(3):
            mine = [tensor.double() for tensor in tensors[rank]]
            for tensor in mine:
                time.sleep(0.02 * chance.random())  # another is the last each time
                CpuDevice().all_reduce([tensor], group, sums=sums)
            for reduced, numbers in zip(mine, expected, strict=True):
                np.testing.assert_array_equal(reduced.numpy(), numbers)
        mine = [tensor.bfloat16() for tensor in tensors[rank]]  # only the last of two sums is rounded
        CpuDevice().all_reduce(mine, group, sums=sums)
        for reduced, numbers in zip(mine, expected, strict=True):
            np.testing.assert_array_equal(reduced.double().numpy(), torch.from_numpy(numbers).bfloat16().double())
    mesh.disconnect()


def _refuse(path: str) -> torch.Tensor:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)


@pytest.mark.parametrize("how", ["shared", "machines", "refused"])
def test_small_and_large_tensors_are_reduced_as_numpy_does(how: str) -> None:
    """Large ones in pieces: through memory that workers of one machine share, or gloo's."""
    _all_end(_reduce, 3, how)


def _reduce_in_groups(rank: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="4")
    if rank == 3:
        shared_memory._segment = _refuse
    mesh = Mesh(rank=rank, local_rank=rank, world_size=4, local_world_size=4, tensor_parallel_size=2)
    mesh = mesh.connect("gloo", 30)
    groups = (mesh.data_parallel_group, mesh.tensor_parallel_group)
    for group in groups:
        mine = next(ranks for ranks in group.ranks if rank in ranks)
        assert (group.links.shared_memory is not None) is (3 not in mine)
        total = torch.full((50_000,), float(rank))
        CpuDevice().all_reduce([total], group)
        assert total.unique().tolist() == [sum(mine)]
    assert "Permission denied" in mesh.not_shared, "also on the root, whose groups do share"
    mesh.disconnect()


def test_a_worker_that_cannot_share_keeps_no_other_group_waiting() -> None:
    _all_end(_reduce_in_groups, 4)


def test_no_more_than_so_many_load_at_once_and_all_do(tmp_path: Path) -> None:
    log = tmp_path / "log"
    _all_end(_start, 5, str(log))
    inside: set[str] = set()
    done = []
    for line in log.read_text().splitlines():
        word, rank = line.split()
        inside.symmetric_difference_update({rank})
        assert len(inside) <= 2
        if word == "out":
            done.append(int(rank))
    assert [set(done[:2]), set(done[2:4]), set(done[4:])] == [{0, 1}, {2, 3}, {4}]
