"""Checks that workers hold alike the weights and moments that they should hold alike, and finite ones."""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from common.errors import AgreedError, CheckpointError, NonFiniteStep, ReplicasDiffer
from trainer.parallel.shares import split_like
from trainer.run import Run
from trainer.state import TrainState

#: Of a tensor: its checksum, and whether all values are finite.
Summary = tuple[int, bool]


class ReplicaCheck:
    """Compares the weights and moments that several workers should hold alike. All workers call it together."""

    def __init__(self, run: Run, model: dict[str, Tensor], optimizer: dict[str, Tensor], *, are_shared: bool) -> None:
        """The model's and the optimizer's tensors, by name; the latter differ from worker to worker if
        `are_shared`."""
        self._config, self._device, self._mesh = run.config, run.device, run.mesh
        self._tensors = {**model, **optimizer}
        self._alike = model if are_shared else self._tensors
        #: Those that tensor-parallel ranks do not split.
        self._unsplit = [name for name in self._alike if split_like(name) is None]

    def is_due(self, state: TrainState) -> bool:
        """Whether `--replica_check_steps` asks for a check of `state`."""
        interval = self._config.replica_check_steps
        return self._mesh.world_size > 1 and interval > 0 and state.step % interval == 0

    def require_finite(self) -> None:
        """The part of the check that needs no other worker. Raises `CheckpointError`."""
        if broken := _not_finite(self._summaries()):
            raise CheckpointError(f"{broken} is no longer finite; training resumes from the previous checkpoint")

    def require_equal(self, state: TrainState) -> None:
        """Data-parallel workers hold everything alike, tensor-parallel ranks what they do not split, unless the
        hardware rounds at random: their programs differ, so their random numbers may.

        Raises, on all workers, `ReplicasDiffer` naming the ranks that differ from the majority, `NonFiniteStep`, or
        `AgreedError` if the phase began with such weights. A trial is not checked.
        """
        if self._config.trial:
            return
        mesh, step = self._mesh, f"step {state.global_step}"
        summaries = self._summaries()
        unsplit = self._unsplit if self._device.resumes_exactly(state.precision) else []
        digests = [_digest(summaries, names) for names in (self._alike, unsplit)]
        found = mesh.all_gather_object((digests, _not_finite(summaries)))
        differing = [
            (set(ranks), odd_ones)
            for which, group in enumerate((mesh.data_parallel_group, mesh.tensor_parallel_group))
            for ranks in group.ranks
            if (odd_ones := _odd_ones(ranks, [digests[which] for digests, _ in found]))
        ]
        if differing:
            every = [odd_ones for _, odd_ones in differing]
            # Whoever is odd in all groups that differ explains them; else each group has its own.
            odd = sorted(set.intersection(*every) or set.union(*every))
            who = f"of worker{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd))} differ"
            others = "" if all(ranks <= set(odd) for ranks, _ in differing) else " from those of the others"
            raise ReplicasDiffer(
                f"{step}: the weights or moments {who}{others}; nothing of this step is saved: run the same "
                f"command again to resume from the last checkpoint, and if a worker is named again, replace its "
                f"device or memory"
            )
        for rank, (_, name) in enumerate(found):
            if name and not state.step:
                raise AgreedError(f"{step}: {name} of worker {rank} is not finite; begin with other weights")
            if name:
                raise NonFiniteStep(f"{step}: {name} of worker {rank} is no longer finite", step=state.step - 1)

    def _summaries(self) -> dict[str, Summary]:
        """Of this worker's tensors, by name."""
        return dict(zip(self._tensors, self._device.summaries(list(self._tensors.values())), strict=True))


def _digest(summaries: dict[str, Summary], names: Iterable[str]) -> str:
    return hashlib.sha256(repr([summaries[name][0] for name in names]).encode()).hexdigest()


def _not_finite(summaries: dict[str, Summary]) -> str:
    """The first tensor with a value that is not finite; "" if there is none."""
    return next((name for name, (_, is_finite) in summaries.items() if not is_finite), "")


def _odd_ones(ranks: list[int], digests: list[str]) -> set[int]:
    """Those of `ranks` that differ from the majority; all of them if there is none."""
    digest, count = collections.Counter(digests[rank] for rank in ranks).most_common(1)[0]
    return {rank for rank in ranks if digests[rank] != digest or 2 * count <= len(ranks) != count}


def flip_a_bit(tensor: Tensor) -> None:
    """Simulate a memory fault, for tests: flip a bit of one element's fraction; not the lowest, which the next update
    may round away."""
    value = tensor.detach().view(-1)[:1].cpu()
    value.view(torch.uint8)[0] ^= 0x40
    tensor.detach().view(-1)[:1] = value.to(tensor.device)
