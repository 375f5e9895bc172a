"""Checks of what workers exchange, against sums that are known."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from trainer.machine.subject import Finding, Subject, differing, fetch
from trainer.parallel.mesh import Group

#: Elements: one, fewer than workers, some, and more than gloo's halves (trainer/devices/base.py).
_SIZES = (1, 3, 1000, (1 << 20) + 3)


def check_collectives(subject: Subject) -> Iterator[Finding]:
    """Sums and maxima over each group of workers; the same bits in every worker and every time."""
    mesh = subject.mesh
    if mesh.world_size == 1:
        yield Finding("one worker; --spawn 2 or torchrun starts several")
        return
    yield Finding("sum of ranks on the hosts", abs(mesh.sum_on_host([mesh.rank])[0] - sum(range(mesh.world_size))))
    yield Finding("objects on the hosts", float(mesh.all_gather_object(mesh.rank) != list(range(mesh.world_size))))
    groups = {"data-parallel": mesh.data_parallel_group, "tensor-parallel": mesh.tensor_parallel_group}
    for name, group in groups.items():
        if group.size > 1:
            yield from (Finding(f"{name} group, {what}", float(count)) for what, count in _sums(subject, group))


def _sums(subject: Subject, group: Group) -> Iterator[tuple[str, int]]:
    """(what, elements that are wrong)."""
    mesh, device = subject.mesh, subject.device
    ranks = next(ranks for ranks in group.ranks if mesh.rank in ranks)
    for sums in (True, False):
        weight = sum(rank + 1 for rank in ranks) if sums else max(ranks) + 1
        # Whole numbers below 2²⁴, so that sums are exact; each tensor and each place has its own.
        patterns = [(index + 1.0) * (torch.arange(size) % 97 + 1) for index, size in enumerate(_SIZES)]
        tensors = [(pattern * (mesh.rank + 1)).to(device.torch_device) for pattern in patterns]
        device.all_reduce(tensors, group, sums=sums)
        for pattern, found in zip(patterns, fetch(device, *tensors), strict=True):
            kind = "sums" if sums else "maxima"
            yield f"wrong {kind} of {pattern.numel()} elements", differing(found, pattern * weight)
    # As tensor parallelism sums activations. Exact: bf16 holds whole numbers up to 256.
    pattern = (torch.arange(1000) % 2).bfloat16()
    tensor = pattern.to(device.torch_device, copy=True)
    device.all_reduce([tensor], group)
    yield "wrong sums in bf16", differing(fetch(device, tensor)[0], pattern * len(ranks))
    random = torch.Generator().manual_seed(mesh.rank)
    mine = torch.randn(_SIZES[-1], generator=random)
    digests = []
    for _ in range(2):
        tensor = mine.to(device.torch_device, copy=True)
        device.all_reduce([tensor], group)
        digests.append(_digest(fetch(device, tensor)[0]))
    yield "sums that are not repeatable", int(digests[0] != digests[1])
    everyones = mesh.all_gather_object(digests[0])
    yield "workers whose sums differ", sum(everyones[rank] != digests[0] for rank in ranks)


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
