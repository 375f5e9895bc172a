"""Checks that data-parallel workers hold identical weights and moments, and finite ones."""

from __future__ import annotations

import collections
import hashlib

import torch
from torch import Tensor

from common.errors import CheckpointError, NonFiniteStep, ReplicasDiffer
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

    def is_due(self, state: TrainState) -> bool:
        """Whether `--replica_check_steps` asks for a check of `state`."""
        interval = self._config.replica_check_steps
        return self._mesh.data_parallel_size > 1 and interval > 0 and state.step % interval == 0

    def require_finite(self) -> None:
        """The part of the check that needs no other worker. Raises `CheckpointError`."""
        if broken := _not_finite(self._summaries()):
            raise CheckpointError(f"{broken} is no longer finite; training resumes from the previous checkpoint")

    def require_equal(self, state: TrainState) -> None:
        """Raises, on all workers, `ReplicasDiffer` naming the ranks that differ from the majority, or `NonFiniteStep`.
        A trial is not checked."""
        if self._config.trial:
            return
        mesh, step = self._mesh, f"step {state.global_step}"
        summaries = self._summaries()
        digest = hashlib.sha256(repr([summaries[name][0] for name in self._alike]).encode()).hexdigest()
        broken = _not_finite(summaries)
        found = mesh.all_gather_object((digest, broken))
        odd = sorted(rank for ranks in mesh.data_parallel_group.ranks for rank in _odd_ones(ranks, found))
        if odd:
            who = f"of worker{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd))} differ"
            others = "" if mesh.data_parallel_size == len(odd) else " from those of the others"
            raise ReplicasDiffer(
                f"{step}: the weights or moments {who}{others}; nothing of this step is saved: run the same "
                f"command again to resume from the last checkpoint, and if a worker is named again, replace its "
                f"device or memory"
            )
        for rank, (_, name) in enumerate(found):
            if name:
                raise NonFiniteStep(f"{step}: {name} of worker {rank} is no longer finite", step=state.step - 1)

    def _summaries(self) -> dict[str, Summary]:
        """Of this worker's tensors, by name."""
        return dict(zip(self._tensors, self._device.summaries(list(self._tensors.values())), strict=True))


def _not_finite(summaries: dict[str, Summary]) -> str:
    """The first tensor with a value that is not finite; "" if there is none."""
    return next((name for name, (_, is_finite) in summaries.items() if not is_finite), "")


def _odd_ones(ranks: list[int], found: list[tuple[str, str]]) -> list[int]:
    """Those of `ranks` that differ from the majority; all of them if there is none."""
    digest, count = collections.Counter(found[rank][0] for rank in ranks).most_common(1)[0]
    return [rank for rank in ranks if found[rank][0] != digest or 2 * count <= len(ranks) != count]


def flip_a_bit(tensor: Tensor) -> None:
    """Simulate a memory fault, for tests: flip a bit of one element's fraction; not the lowest, which the next update
    may round away."""
    value = tensor.detach().view(-1)[:1].cpu()
    value.view(torch.uint8)[0] ^= 0x40
    tensor.detach().view(-1)[:1] = value.to(tensor.device)
