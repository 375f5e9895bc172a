"""Converts between whole tensors and the pieces that tensor-parallel ranks hold (see `trainer/parallel/plan.py`)."""

from __future__ import annotations

from torch import Tensor

from trainer.parallel.plan import Split, share, split_of
from trainer.parallel.tensor import TensorParallel


def split_like(name: str) -> Split | None:
    """How a parameter, or an optimizer's tensor `<kind>.<parameter>`, is split; None: every rank holds all of it."""
    return split_of(name) or split_of(name.partition(".")[2])


def whole_shape(name: str, shape: tuple[int, ...], vocab_size: int, size: int) -> tuple[int, ...]:
    """The whole shape, without padding, of a parameter whose pieces on `size` ranks have `shape`, padding included."""
    split = split_like(name)
    if split is None or size == 1:
        return shape
    length = vocab_size if split.padded else shape[split.axis] * size
    return (*shape[: split.axis], length, *shape[split.axis + 1 :])


def put_share(target: Tensor, name: str, whole: Tensor, ranks: TensorParallel) -> None:
    """Fill `target` with this rank's share of `whole`; padding becomes 0."""
    split = split_like(name)
    if split is None or ranks.size == 1:
        target.copy_(whole)
        return
    place = share(whole.shape[split.axis], ranks.rank, ranks.size)
    put_piece(target, name, whole.narrow(split.axis, place.start, place.stop - place.start))


def put_piece(target: Tensor, name: str, piece: Tensor) -> None:
    """Fill `target` with this rank's `piece`, which has no padding; padding becomes 0."""
    split = split_like(name)
    if split is None or piece.shape == target.shape:
        target.copy_(piece)
        return
    target.zero_()
    target.narrow(split.axis, 0, piece.shape[split.axis]).copy_(piece)


def without_padding(name: str, tensor: Tensor, vocab_size: int, ranks: TensorParallel) -> Tensor:
    """A view of this rank's tensor without its padding, as files hold it."""
    split = split_like(name)
    if split is None or ranks.size == 1:
        return tensor
    length = vocab_size if split.padded else tensor.shape[split.axis] * ranks.size
    place = share(length, ranks.rank, ranks.size)
    return tensor.narrow(split.axis, 0, place.stop - place.start)
