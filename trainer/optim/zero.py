"""ZeRO stage 1: data-parallel workers share the optimizer's state (Rajbhandari et al. 2019, arXiv:1910.02054)."""

from __future__ import annotations

from torch import Tensor

from trainer.optim.parameters import FlatParameters
from trainer.optim.sharing import ALONE


class ShardedParameters(FlatParameters):
    """Each worker updates some of the parameters, and has moments and master weights for those only; all workers have
    all weights and the sums of all gradients. Parameters stay whole, so that every optimizer works as on one worker."""

    def _lay_out(self, extras: int) -> None:
        self._workers, self.replicas = self.replicas, ALONE  # nobody else updates the same parameters
        self.rounding_seed = (self._workers.rank,)
        self._loads = [0] * self._workers.size
        #: (weights, the worker that updates them)
        self._owned: list[tuple[Tensor, int]] = []
        super()._lay_out(extras)

    def _shares(self, names: list[str]) -> list[tuple[bool, list[str]]]:
        """The largest parameters first, each to the worker that has the least so far."""
        shares: list[list[str]] = [[] for _ in self._loads]
        for name in sorted(names, key=lambda name: -self._parameters[name].numel()):
            owner = self._loads.index(min(self._loads))
            self._loads[owner] += self._parameters[name].numel()
            shares[owner].append(name)
        return [(owner == self._workers.rank, share) for owner, share in enumerate(shares)]

    def _place(self, weights: list[Tensor]) -> None:
        self._owned += [(tensor, owner) for owner, tensor in enumerate(weights) if tensor.numel()]

    def exchange(self) -> None:
        """Each worker sends the weights that it has updated to all others."""
        self._workers.broadcast(self._owned)
