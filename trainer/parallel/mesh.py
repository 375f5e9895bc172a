"""The workers of a run: how many there are, which one this is, and the collectives between their hosts."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from common.errors import UserError
from trainer.parallel.host_sum import sum_over_hosts
from trainer.parallel.threads import use_one_core

T = TypeVar("T")
#: Seconds between two polls of whether a worker is still busy: at first, twice as long each time, and at most.
_FIRST_POLL_S, _POLL_S = 0.001, 0.05


@dataclass(frozen=True)
class Group:
    """The workers that this one reduces tensors with, itself included."""

    size: int
    #: The ranks of every group of this kind; together they cover all workers, each once.
    ranks: list[list[int]]
    #: torch.distributed's handle; None: the default group of all workers.
    process_group: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class Mesh:
    """data_parallel_size × tensor_parallel_size workers; tensor-parallel ranks are adjacent."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    #: Workers on this machine.
    local_world_size: int = 1
    tensor_parallel_size: int = 1
    #: gloo group for host tensors and objects; None: the default group already is gloo.
    host_process_group: dist.ProcessGroup | None = None
    #: Process groups of `data_parallel_group` and `tensor_parallel_group`.
    data_process_group: dist.ProcessGroup | None = None
    tensor_process_group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if self.world_size % self.tensor_parallel_size:
            raise UserError(
                f"data_parallel_size = workers / tensor_parallel_size = {self.world_size} / "
                f"{self.tensor_parallel_size} is not a whole number; choose a tensor_parallel_size that divides"
            )

    @property
    def data_parallel_size(self) -> int:
        return self.world_size // self.tensor_parallel_size

    @property
    def data_parallel_rank(self) -> int:
        return self.rank // self.tensor_parallel_size

    @property
    def data_parallel_group(self) -> Group:
        """The workers that hold the same parameters."""
        t = self.tensor_parallel_size
        ranks = [list(range(first, self.world_size, t)) for first in range(t)]
        return Group(self.data_parallel_size, ranks, self.data_process_group)

    @property
    def tensor_parallel_group(self) -> Group:
        """The workers that share one copy of the model."""
        t = self.tensor_parallel_size
        ranks = [list(range(first, first + t)) for first in range(0, self.world_size, t)]
        return Group(t, ranks, self.tensor_process_group)

    @property
    def nodes(self) -> int:
        """Number of machines."""
        return self.world_size // self.local_world_size

    @property
    def tensor_parallel_rank(self) -> int:
        return self.rank % self.tensor_parallel_size

    @property
    def is_root(self) -> bool:
        """Whether this worker writes logs and checkpoints."""
        return self.rank == 0

    @classmethod
    def of_environment(cls, tensor_parallel_size: int) -> Mesh:
        """The mesh described by torchrun's environment variables; a single worker without torchrun. Raises `UserError`
        if they contradict each other."""
        rank, local_rank, world_size, local_world_size = (int(os.environ.get(n, d)) for n, d in _TORCHRUN.items())
        if not local_rank < local_world_size <= world_size or not rank < world_size:
            said = ", ".join(f"{name}={os.environ.get(name, 'unset')}" for name in _TORCHRUN)
            raise UserError(f"{said}: these do not describe a worker; start all workers with torchrun")
        return cls(rank, local_rank, world_size, local_world_size, tensor_parallel_size)

    def connect(
        self, backend: str, timeout_s: float, *, init_method: str = "env://", alone: bool = False
    ) -> Mesh:  # fmt: skip
        """Set up the process groups and return the mesh that uses them.

        `backend` reduces the device's tensors; gloo always serves the host. `alone`: set up a process group even for a
        single worker. Raises `UserError` if the process group numbers the workers differently from torchrun, or
        if machines have different numbers of workers.
        """
        if self.world_size == 1:
            if alone:
                dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
            return self
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(backend, init_method=init_method, timeout=timeout)
        if (dist.get_rank(), dist.get_world_size()) != (self.rank, self.world_size):
            raise UserError(
                f"torchrun calls this worker {self.rank} of {self.world_size}, the process group of backend {backend} "
                f"calls it {dist.get_rank()} of {dist.get_world_size()}; start all workers with the same torchrun "
                f"command"
            )
        mesh = self
        if "gloo" not in backend:
            mesh = dataclasses.replace(mesh, host_process_group=dist.new_group(backend="gloo", timeout=timeout))
        mesh._require_equal_machines()
        if self.tensor_parallel_size > 1:
            data, tensor = (
                dist.new_subgroups_by_enumeration(group.ranks, timeout=timeout)[0]
                for group in (self.data_parallel_group, self.tensor_parallel_group)
            )
            mesh = dataclasses.replace(mesh, data_process_group=data, tensor_process_group=tensor)
        return mesh

    def _require_equal_machines(self) -> None:
        """Raise `UserError` unless each machine has as many workers as the others: its turns, cores and shares of files
        are numbered accordingly."""
        own = self.local_world_size
        total, squares = self.sum_on_host([own, own**2])
        if self.world_size * squares != total**2:  # equal only without variance
            raise UserError(
                f"this machine has {own} workers, others have more or fewer; allowed: as many on each, such as "
                f"torchrun's --nproc_per_node={own} everywhere"
            )

    def disconnect(self) -> None:
        """Wait for the other workers, so that none is left inside a collective, and destroy the process groups."""
        if dist.is_initialized():
            self.barrier()
            dist.destroy_process_group()

    def barrier(self) -> None:
        """Wait until all workers have reached this point."""
        self.sum_on_host([0])

    def in_turns(self, work: Callable[[], None], *, at_once: int) -> None:
        """Run `work` in every worker, at most `at_once` workers of each machine at a time, however long it takes."""
        for first in range(0, self.local_world_size, at_once):
            is_mine = first <= self.local_rank < first + at_once
            self.patiently(work if is_mine else lambda: None)

    def by_root(self, work: Callable[[], T]) -> T:
        """Run `work` in the root and return its result in every worker; may take longer than the collective timeout."""
        result = self.broadcast_object(self.patiently(lambda: [work()] if self.is_root else []))
        assert result is not None
        return result[0]

    def broadcast_object(self, value: T | None) -> T | None:
        """The root's `value`, in every worker; the other workers' `value` is ignored."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.host_process_group, device=torch.device("cpu"))
        return box[0]

    def all_gather_object(self, value: T) -> list[T]:
        """Every worker's `value`, by rank, in every worker."""
        if self.world_size == 1:
            return [value]
        values = [value] * self.world_size
        dist.all_gather_object(values, value, group=self.host_process_group)
        return values

    def wait_while(self, is_busy: Callable[[], bool]) -> None:
        """Wait until `is_busy` is false in every worker.

        The workers keep polling each other, so this may take longer than the collective timeout, yet a worker that dies
        still ends the wait.
        """
        pause_s = _FIRST_POLL_S
        while self.world_size > 1 and self.sum_on_host([is_busy()])[0]:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S)

    def patiently(self, work: Callable[[], T]) -> T:
        """Run `work` in every worker, wait until all are done, however long it takes, and return this one's result."""
        if self.world_size == 1:
            return work()
        is_done = threading.Event()
        # The work stays in this thread: torch would make threads for another one.
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="patient", initializer=use_one_core) as executor:
            waiting = executor.submit(self.wait_while, lambda: not is_done.is_set())
            try:
                result = work()
            finally:
                is_done.set()
            waiting.result()
            return result

    def sum_on_host(self, values: Sequence[int]) -> list[int]:
        """Element-wise sums, over all workers, of short lists of integers."""
        if self.world_size == 1:
            return list(values)
        mine = torch.tensor(values, dtype=torch.int64)
        sums: list[int] = sum_over_hosts(mine, self.rank, self.world_size, self.host_process_group).tolist()
        return sums


#: torchrun's environment variables, and their values for a single worker.
_TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
