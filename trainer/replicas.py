"""Checks during training: all values are finite, and data-parallel workers hold identical weights and moments."""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from common.errors import NonFiniteStep, ReplicasDiffer
from trainer.devices.base import Device
from trainer.parallel.mesh import Mesh


def require_sound(tensors: Mapping[str, Tensor], global_step: int, device: Device, mesh: Mesh) -> None:
    """Compare `tensors` with those of the workers that should hold the same values; called by all at the same time.

    Raises, on all workers, `ReplicasDiffer` naming the ranks that differ from the majority, or `NonFiniteStep`.
    """
    summaries = dict(zip(tensors, device.summaries(list(tensors.values())), strict=True))
    digest = hashlib.sha256(repr([bits for bits, _ in summaries.values()]).encode()).hexdigest()
    broken = next((name for name, (_, is_finite) in summaries.items() if not is_finite), "")
    found = mesh.all_gather_object((digest, broken))
    odd = sorted(rank for ranks in mesh.data_parallel_group.ranks for rank in _odd_ones(ranks, found))
    if odd:
        who = f"of worker{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd))}"
        which = f"{who} differ" if mesh.data_parallel_size == len(odd) else f"{who} differ from those of the others"
        raise ReplicasDiffer(
            f"step {global_step}: the weights or moments {which}; nothing is saved of this step: run the same again "
            f"to go on from the last checkpoint, and if a worker is named again, replace its device or memory"
        )
    for rank, (_, name) in enumerate(found):
        if name:
            raise NonFiniteStep(f"step {global_step}: {name} of worker {rank} is not finite any more")


def require_finite_steps(mine: tuple[int, str] | None, batch_of: Callable[[int], int], mesh: Mesh) -> None:
    """Raise `NonFiniteStep`, on all workers, for the first step that was not finite on any. `mine`: this worker's first
    such step, counted from 0 in the phase, and the message about it."""
    found = [one for one in mesh.all_gather_object(mine) if one is not None]
    if found:
        step, text = min(found)
        error = NonFiniteStep(text)
        error.batch = batch_of(step)
        raise error


def _odd_ones(ranks: list[int], found: list[tuple[str, str]]) -> list[int]:
    """Those of `ranks` that differ from the majority; all of them if there is none."""
    digest, count = collections.Counter(found[rank][0] for rank in ranks).most_common(1)[0]
    return [rank for rank in ranks if found[rank][0] != digest or 2 * count <= len(ranks) != count]


def flip_a_bit(tensor: Tensor) -> None:
    """Simulate a memory fault, for tests: flip the lowest bit of one element's fraction."""
    value = tensor.detach().view(-1)[:1].cpu()
    value.view(torch.uint8)[0] ^= 1
    tensor.detach().view(-1)[:1] = value.to(tensor.device)
