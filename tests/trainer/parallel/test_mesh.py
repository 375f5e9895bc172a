"""Workers take turns, and reduce tensors together."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from common.errors import UserError
from tests.helpers.support import all_end
from trainer.devices.cpu import CpuDevice
from trainer.parallel.mesh import Mesh


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


#: Small; odd and large enough to be reduced in two parts; medium-sized.
SHAPES = [(5,), ((1 << 20) + 1,), (2, 3), (30_011,)]


def _reduce(rank: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="3")
    mesh = Mesh(rank=rank, local_rank=rank, world_size=3, local_world_size=3).connect("gloo", 60)
    group = mesh.data_parallel_group
    tensors = [[torch.from_numpy(np.random.default_rng(r).integers(-99, 99, s)) for s in SHAPES] for r in range(3)]
    for sums, combined in ((True, np.sum), (False, np.max)):
        expected = [combined([t.numpy() for t in each], axis=0) for each in zip(*tensors, strict=True)]
        reduced = [tensor.double() for tensor in tensors[rank]]
        CpuDevice().all_reduce(reduced, group, sums=sums)
        for found, numbers in zip(reduced, expected, strict=True):
            np.testing.assert_array_equal(found.numpy(), numbers)
    mesh.disconnect()


def test_small_and_large_tensors_are_reduced_as_numpy_does() -> None:
    all_end(_reduce, 3)


def _reduce_repeatedly(rank: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="4")
    mesh = Mesh(rank=rank, local_rank=rank, world_size=4, local_world_size=4).connect("gloo", 60)
    own = [torch.from_numpy(np.random.default_rng(rank).normal(0, 1000, s).astype(np.float32)) for s in SHAPES]
    chance = random.Random(f"{folder} {rank}")
    digest = hashlib.sha256()
    for _ in range(3):
        reduced = [tensor.clone() for tensor in own]
        time.sleep(0.02 * chance.random())  # a different worker arrives last each time
        CpuDevice().all_reduce(reduced, mesh.data_parallel_group)
        for tensor in reduced:
            digest.update(tensor.numpy().tobytes())
    Path(folder, str(rank)).write_text(digest.hexdigest())
    mesh.disconnect()


def test_sums_have_the_same_bytes_on_every_worker_and_in_every_run(tmp_path: Path) -> None:
    """Replicas stay equal and resumes bit-exact only if gloo adds in an order fixed by tensor size and worker count."""
    for run in ("first", "second"):
        (tmp_path / run).mkdir()
        all_end(_reduce_repeatedly, 4, str(tmp_path / run))
    assert len({path.read_text() for path in tmp_path.glob("*/*")}) == 1


def _reduce_in_groups(rank: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="4")
    mesh = Mesh(rank=rank, local_rank=rank, world_size=4, local_world_size=4, tensor_parallel_size=2)
    mesh = mesh.connect("gloo", 30)
    for group in (mesh.data_parallel_group, mesh.tensor_parallel_group):
        mine = next(ranks for ranks in group.ranks if rank in ranks)
        total = torch.full((50_000,), float(rank))
        CpuDevice().all_reduce([total], group)
        assert total.unique().tolist() == [sum(mine)]
    mesh.disconnect()


def test_groups_reduce_among_their_own_workers() -> None:
    all_end(_reduce_in_groups, 4)


def test_no_more_than_so_many_load_at_once_and_all_do(tmp_path: Path) -> None:
    log = tmp_path / "log"
    all_end(_start, 5, str(log))
    inside: set[str] = set()
    done = []
    for line in log.read_text().splitlines():
        word, rank = line.split()
        inside.symmetric_difference_update({rank})
        assert len(inside) <= 2
        if word == "out":
            done.append(int(rank))
    assert [set(done[:2]), set(done[2:4]), set(done[4:])] == [{0, 1}, {2, 3}, {4}]


def _slowly(rank: int, port: int, log: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    mesh = Mesh(rank=rank, local_rank=rank, world_size=2, local_world_size=2).connect("gloo", 8)
    threads: list[str] = []

    def work() -> None:
        threads.append(threading.current_thread().name)
        time.sleep(10 * (1 - rank))

    mesh.in_turns(work, at_once=1)
    assert mesh.by_root(lambda: "read") == "read"
    assert threads == ["MainThread"]
    Path(log, str(rank)).touch()
    mesh.disconnect()


@pytest.mark.slow
def test_a_turn_may_take_longer_than_a_collective(tmp_path: Path) -> None:
    all_end(_slowly, 2, str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}


@pytest.mark.parametrize("given", [{"LOCAL_RANK": "8"}, {"RANK": "2"}, {"LOCAL_WORLD_SIZE": "4"}])
def test_an_environment_that_describes_no_worker_is_refused(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str]
) -> None:
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", **given}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"RANK=.*, LOCAL_RANK=.*: these do not describe a worker; start all workers"):
        Mesh.of_environment(1)


def _unequal(rank: int, port: int) -> None:
    """Two workers on one machine, one on another."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="3")
    own = 2 if rank < 2 else 1
    with pytest.raises(UserError, match=f"this machine has {own} workers, others have more or fewer"):
        Mesh(rank=rank, local_rank=rank % 2, world_size=3, local_world_size=own).connect("gloo", 60)


def test_machines_with_other_numbers_of_workers_are_refused_by_all() -> None:
    """They would wait for turns that the others do not take."""
    all_end(_unequal, 3)
