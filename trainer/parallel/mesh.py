"""The workers of a run: how many, which one this is, and what they can say to each other."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from common.errors import UserError
from trainer.parallel.shared_memory import SharedMemory, all_gather_object

T = TypeVar("T")
#: Seconds between two questions whether a worker is still busy.
_LOOK_EVERY_S = 0.05


class Links(NamedTuple):
    """What the workers of a group talk through."""

    #: torch.distributed's handle; None: that of all workers.
    process_group: dist.ProcessGroup | None = None
    #: Where they are on one machine and their tensors in its memory.
    shared_memory: SharedMemory | None = None


@dataclass(frozen=True)
class Group:
    """Workers that reduce tensors together, this one among them."""

    size: int
    #: The ranks of all groups of this kind: every worker is in one of them.
    ranks: list[list[int]]
    links: Links = Links()


@dataclass(frozen=True)
class Mesh:
    """data_parallel_size × tensor_parallel_size workers; tensor-parallel ranks are neighbours."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    #: Workers on this machine.
    local_world_size: int = 1
    tensor_parallel_size: int = 1
    #: Over which hosts talk, whatever their devices do; None: all workers' default group.
    host_group: dist.ProcessGroup | None = None
    #: Of the workers with the same parameters, and of those that share a model.
    data_links: Links = Links()
    tensor_links: Links = Links()
    #: Why some workers of one machine do not share memory; the same on all, empty where all do.
    not_shared: str = ""

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
        return Group(self.data_parallel_size, [list(range(r, self.world_size, t)) for r in range(t)], self.data_links)

    @property
    def tensor_parallel_group(self) -> Group:
        """The workers that share one copy of the model."""
        t = self.tensor_parallel_size
        return Group(t, [list(range(r, r + t)) for r in range(0, self.world_size, t)], self.tensor_links)

    @property
    def nodes(self) -> int:
        """Machines."""
        return self.world_size // self.local_world_size

    @property
    def tensor_parallel_rank(self) -> int:
        return self.rank % self.tensor_parallel_size

    @property
    def is_root(self) -> bool:
        """Whether this worker writes the logs and checkpoints."""
        return self.rank == 0

    @classmethod
    def of_environment(cls, tensor_parallel_size: int) -> Mesh:
        """The mesh torchrun set up for this process; a single worker without torchrun."""
        rank, local_rank, world_size, local_world_size = (int(os.environ.get(n, d)) for n, d in _TORCHRUN.items())
        return cls(rank, local_rank, world_size, local_world_size, tensor_parallel_size)

    def connect(self, backend: str, timeout_s: float, *, alone: bool = False) -> Mesh:
        """Meet the other workers; returns the mesh that can talk. `backend` serves the device's tensors, gloo the
        host's. With `alone` a single worker makes a process group, too. Raises `UserError` if not all are there."""
        if self.world_size == 1:
            if alone:
                dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
            return self
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(backend, timeout=timeout)
        if dist.get_world_size() != self.world_size:
            raise UserError(
                f"torchrun announced {self.world_size} workers, the process group has {dist.get_world_size()}; "
                f"start all workers with the same torchrun command"
            )
        mesh = self
        if "gloo" not in backend:
            mesh = dataclasses.replace(mesh, host_group=dist.new_group(backend="gloo", timeout=timeout))
        data, tensor = Links(), Links()
        if self.tensor_parallel_size > 1:
            data, tensor = (
                Links(dist.new_subgroups_by_enumeration(group.ranks, timeout=timeout)[0])
                for group in (self.data_parallel_group, self.tensor_parallel_group)
            )
        if backend == "gloo":
            # Every group by itself: where one has failed, the others' members still wait for each other.
            data, problem = self._sharing(data, self.data_parallel_group)
            tensor, another = self._sharing(tensor, self.tensor_parallel_group)
            problems = all_gather_object(problem or another)
            mesh = dataclasses.replace(mesh, not_shared=next(filter(None, problems), ""))
        return dataclasses.replace(mesh, data_links=data, tensor_links=tensor)

    def _sharing(self, links: Links, group: Group) -> tuple[Links, str]:
        """The same links, with shared memory if all of the group are on one machine; and why not, if it failed."""
        ranks = next(ranks for ranks in group.ranks if self.rank in ranks)
        if group.size == 1 or len({rank // self.local_world_size for rank in ranks}) > 1:
            return links, ""
        try:
            return links._replace(shared_memory=SharedMemory(links.process_group)), ""
        except OSError as error:
            return links, str(error)

    def disconnect(self) -> None:
        """Wait for the others, so that none is left in a collective operation, and leave."""
        if dist.is_initialized():
            self.barrier()
            dist.destroy_process_group()

    def barrier(self) -> None:
        """Wait until all workers are here."""
        self.sum_on_host([0])

    def in_turns(self, work: Callable[[], None], *, at_once: int) -> None:
        """Have `work` done by so many workers of each machine at a time, one lot after the other."""
        for first in range(0, self.local_world_size, at_once):
            if first <= self.local_rank < first + at_once:
                work()
            self.barrier()

    def by_root(self, work: Callable[[], T]) -> T:
        """What `work` returns in the root, in every worker; it may take longer than workers wait for each other."""
        told = self.broadcast_object(self.patiently(lambda: [work()] if self.is_root else []))
        assert told is not None
        return told[0]

    def broadcast_object(self, value: T | None) -> T | None:
        """The root's `value`, in every worker; the others' is not looked at."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.host_group, device=torch.device("cpu"))
        return box[0]

    def all_gather_object(self, value: T) -> list[T]:
        """Each worker's `value`, by rank, in every worker."""
        return [value] if self.world_size == 1 else all_gather_object(value, self.host_group)

    def wait_while(self, is_busy: Callable[[], bool]) -> None:
        """Wait until no worker `is_busy`. They ask each other all the time, so it may take longer than a collective
        operation may; a worker that has died still ends it."""
        while self.world_size > 1 and self.sum_on_host([is_busy()])[0]:
            time.sleep(_LOOK_EVERY_S)

    def patiently(self, work: Callable[[], T]) -> T:
        """What `work` returns here, once it is done in every worker, however long that takes."""
        if self.world_size == 1:
            return work()
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="patient") as executor:
            future = executor.submit(work)
            self.wait_while(lambda: not future.done())
            return future.result()

    def sum_on_host(self, values: Sequence[int]) -> list[int]:
        """Element-wise sums of small lists of integers over all workers."""
        if self.world_size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(tensor, group=self.host_group)
        sums: list[int] = tensor.tolist()
        return sums


#: What torchrun sets, and what holds without it.
_TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
