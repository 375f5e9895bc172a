"""Gathers, for checkpoints, what data-parallel workers keep in shares (`trainer/optim/zero.py`)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.parallel.mesh import Mesh


class OptimizerShares:
    """The optimizer's tensors by worker; without shares, every worker keeps all of them."""

    def __init__(self, mesh: Mesh, own: dict[str, Tensor], *, are_shared: bool) -> None:
        """`own`: the tensors that this worker keeps, by name. All workers call this together if `are_shared`."""
        self._own, self.are_shared = own, are_shared
        self._process_group = mesh.host_process_group
        self._ranks = mesh.data_parallel_group.ranks[mesh.tensor_parallel_rank]
        #: What each of the other workers keeps, by name, as tensors without data.
        self._others: dict[int, dict[str, Tensor]] = {}
        if are_shared:
            described = {name: torch.empty_like(tensor, device="meta") for name, tensor in own.items()}
            found = mesh.all_gather_object(described)
            self._others = {rank: found[rank] for rank in self._ranks if rank != mesh.rank}

    @property
    def elsewhere(self) -> dict[str, Tensor]:
        """What the other workers that have the same weights keep, by name, as tensors without data."""
        return {name: tensor for tensors in self._others.values() for name, tensor in tensors.items()}

    def everything(self) -> dict[str, Tensor]:
        """This worker's tensors and all others' (without data), in an order that does not depend on who keeps what."""
        together = self._own | self.elsewhere
        return {name: together[name] for name in sorted(together)} if self.are_shared else together

    def send(self) -> None:
        """Send this worker's tensors to the first worker, which calls `receive`."""
        if self.are_shared:
            for tensor in self._own.values():
                dist.send(tensor.detach().cpu(), dst=self._ranks[0], group=self._process_group)

    def receive(self, copies: dict[str, Tensor]) -> None:
        """Fill the `copies` of what the other workers keep; they call `send`."""
        for rank, tensors in self._others.items():
            for name in tensors:
                dist.recv(copies[name], src=rank, group=self._process_group)
