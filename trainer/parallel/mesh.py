"""The workers of a run: how many, which one this is, and what they can say to each other."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from trainer.errors import UserError


@dataclass(frozen=True)
class Mesh:
    """data_parallel_size × tensor_parallel_size workers; tensor-parallel ranks are neighbours."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    tensor_parallel_size: int = 1

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
    def is_root(self) -> bool:
        """Whether this worker writes the logs and checkpoints."""
        return self.rank == 0

    @classmethod
    def of_environment(cls, tensor_parallel_size: int) -> Mesh:
        """The mesh torchrun set up for this process; a single worker without torchrun."""
        number = {name: int(os.environ.get(name, default)) for name, default in _TORCHRUN.items()}
        return cls(number["RANK"], number["LOCAL_RANK"], number["WORLD_SIZE"], tensor_parallel_size)

    def connect(self, backend: str, timeout_s: float) -> None:
        """Meet the other workers. `backend` serves the device's tensors, gloo the host's."""
        if self.world_size > 1:
            backends = "gloo" if backend == "gloo" else f"cpu:gloo,{backend}"
            dist.init_process_group(backends, timeout=timedelta(seconds=timeout_s))
            if dist.get_world_size() != self.world_size:
                raise UserError(
                    f"torchrun announced {self.world_size} workers, the process group has {dist.get_world_size()}; "
                    f"start all workers with the same torchrun command"
                )

    def disconnect(self) -> None:
        """Wait for the others, so that none is left in a collective operation, and leave."""
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()

    def barrier(self) -> None:
        """Wait until all workers are here."""
        if self.world_size > 1:
            dist.barrier()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum `tensor` over the data-parallel workers, in place, in an order fixed by its size and the workers."""
        if self.world_size > 1:
            dist.all_reduce(tensor)

    def sum_on_host(self, values: Sequence[int]) -> list[int]:
        """Element-wise sums of small lists of integers over all workers."""
        if self.world_size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(tensor)
        sums: list[int] = tensor.tolist()
        return sums


#: What torchrun sets, and what holds without it.
_TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
