"""Workers take turns."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import numpy as np
import torch

from tests.support import FORKS
from trainer.devices.cpu import CpuDevice
from trainer.parallel.mesh import Mesh
from trainer.process import free_port


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


def _reduce(rank: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="3")
    mesh = dataclasses.replace(Mesh(), rank=rank, local_rank=rank, world_size=3, local_world_size=3).connect("gloo", 60)
    shapes = [(5,), ((1 << 20) + 1,), (2, 3)]  # one is large, of an odd length
    everybodys = [[torch.from_numpy(np.random.default_rng(r).integers(-99, 99, s)) for s in shapes] for r in range(3)]
    for sums, combined in ((True, np.sum), (False, np.max)):
        mine = [tensor.double() for tensor in everybodys[rank]]
        CpuDevice().all_reduce(mine, mesh.data_parallel_group, sums=sums)
        for reduced, each in zip(mine, zip(*everybodys, strict=True), strict=True):
            np.testing.assert_array_equal(reduced.numpy(), combined([t.numpy() for t in each], axis=0))
    mesh.disconnect()


def test_small_and_large_tensors_are_reduced_as_numpy_does() -> None:
    """Large ones go in two pieces."""
    port = free_port()
    workers = [FORKS.Process(target=_reduce, args=(rank, port)) for rank in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0


def test_no_more_than_so_many_load_at_once_and_all_do(tmp_path: Path) -> None:
    log, port = tmp_path / "log", free_port()
    workers = [FORKS.Process(target=_start, args=(rank, port, str(log))) for rank in range(5)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    inside: set[str] = set()
    done = []
    for line in log.read_text().splitlines():
        word, rank = line.split()
        inside.symmetric_difference_update({rank})
        assert len(inside) <= 2
        if word == "out":
            done.append(int(rank))
    assert [set(done[:2]), set(done[2:4]), set(done[4:])] == [{0, 1}, {2, 3}, {4}]
