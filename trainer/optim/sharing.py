"""How workers share the parameters and the work of an update."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SharedModel:
    """Ranks that share one model: some tensors are split over them, the others are the same on all."""

    rank: int
    size: int
    #: The axis along which a parameter is split in equal pieces; None: it is the same on all ranks.
    split_axis: Callable[[str], int | None]
    #: Adds up a tensor over the ranks, in place.
    all_reduce: Callable[[Tensor], None]
    #: A context in which each rank draws random numbers of its own.
    random_region: Callable[[], contextlib.AbstractContextManager[None]]

    def is_split(self, name: str) -> bool:
        return self.split_axis(name) is not None

    def whole(self, pieces: dict[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors, by parameter, from this rank's pieces, in one reduction."""
        found = {}
        for name, piece in pieces.items():
            axis = self.split_axis(name)
            others = torch.zeros_like(piece)
            parts = [piece if rank == self.rank else others for rank in range(self.size)]
            found[name] = piece if axis is None else torch.cat(parts, axis)
        split = [name for name in pieces if self.is_split(name)]
        if split:
            flat = torch.cat([found[name].reshape(-1) for name in split])
            self.all_reduce(flat)
            for name, part in zip(split, flat.split([found[name].numel() for name in split]), strict=True):
                found[name] = part.view(found[name].shape)
        return found

    def piece(self, name: str, whole: Tensor) -> Tensor:
        """This rank's piece of a whole tensor of the layout of parameter `name`."""
        axis = self.split_axis(name)
        return whole if axis is None else whole.chunk(self.size, axis)[self.rank]

    def norm(self, gradients: dict[str, Tensor]) -> Tensor:
        """The L2 norm of all gradients of the model, each counted once."""
        squares = {
            split: [torch.linalg.vector_norm(g) ** 2 for name, g in gradients.items() if self.is_split(name) is split]
            for split in (True, False)
        }
        split = torch.stack(squares[True]).sum()
        self.all_reduce(split)
        return (split + torch.stack(squares[False]).sum()).sqrt()

    def whole_norms(self, names: list[str], norms: Tensor) -> Tensor:
        """L2 norms of whole tensors from those of this rank's pieces, (…, T); `names`: the T parameters."""
        split = _index(tuple(at for at, name in enumerate(names) if self.is_split(name)), norms.device)
        squares = norms[..., split] ** 2
        self.all_reduce(squares)
        norms = norms.clone()
        norms[..., split] = squares.sqrt()
        return norms


@dataclass(frozen=True)
class Replicas:
    """The workers that hold the same parameters; by default a single one."""

    rank: int = 0
    size: int = 1
    #: Adds up tensors over the workers, in place.
    all_reduce: Callable[[list[Tensor]], None] = lambda tensors: None
    #: Replaces each tensor by that of the worker whose rank is given with it.
    broadcast: Callable[[list[tuple[Tensor, int]]], None] = lambda tensors: None

    def share(self, stacks: list[Tensor], work: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """`work`, which treats all L alike and keeps the shape, applied to each stack (L, …); each worker does a part.

        The parts are put together by a sum, in which all other workers have zeros.
        """
        if self.size == 1:
            return [work(stack) for stack in stacks]
        done = []
        for stack in stacks:
            each = -(-len(stack) // self.size)
            mine = _index(tuple(range(self.rank * each, (self.rank + 1) * each)), stack.device)
            results = work(stack.index_select(0, mine.clamp(max=len(stack) - 1)))
            padded = torch.zeros((each * self.size, *stack.shape[1:]), dtype=results.dtype, device=stack.device)
            done.append(padded.index_copy(0, mine, results))
        self.all_reduce(done)
        return [padded[: len(stack)] for padded, stack in zip(done, stacks, strict=True)]


@functools.cache
def _index(places: tuple[int, ...], device: torch.device) -> Tensor:
    """Put on the device once for all steps, as each would wait for the copy. From the host, because a number in the
    program would make it another program on every worker."""
    return torch.tensor(places, dtype=torch.int64).to(device)


#: A worker without others.
ALONE = Replicas()
