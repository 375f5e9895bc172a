"""How tensor parallelism splits each parameter: one table for training, merging and splitting. Imports no torch.

t is the tensor-parallel size, r a rank in 0 … t-1. Rank r holds the elements [r·⌈n/t⌉, min((r+1)·⌈n/t⌉, n)) of a split
axis of length n. t must divide the number of attention heads and the intermediate size; it need not divide the
vocabulary: in training every rank has ⌈V/t⌉ rows, of which those past V are padding. Files hold no padding: one after
another, the ranks' pieces are the whole tensor.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Split:
    """How a parameter is split among ranks."""

    #: Axis of the parameter; torch stores weights as (out, in).
    axis: int
    #: Parameters of one group must all be split, or none of them.
    group: str
    #: Whether the axis is padded to a multiple of t.
    padded: bool = False


_ATTENTION_COLUMN = Split(0, "attention")
_FEED_FORWARD_COLUMN = Split(0, "feed-forward")
_VOCABULARY = Split(0, "vocabulary", padded=True)

#: Patterns of Hugging Face's parameter names → split. The first match counts; a parameter without one is not split.
PLAN: tuple[tuple[str, Split], ...] = (
    ("bert.encoder.layer.*.attention.self.query.*", _ATTENTION_COLUMN),
    ("bert.encoder.layer.*.attention.self.key.*", _ATTENTION_COLUMN),
    ("bert.encoder.layer.*.attention.self.value.*", _ATTENTION_COLUMN),
    ("bert.encoder.layer.*.attention.output.dense.weight", Split(1, "attention")),
    ("bert.encoder.layer.*.intermediate.dense.*", _FEED_FORWARD_COLUMN),
    ("bert.encoder.layer.*.output.dense.weight", Split(1, "feed-forward")),
    ("bert.embeddings.word_embeddings.weight", _VOCABULARY),
    ("cls.predictions.decoder.*", _VOCABULARY),
    ("cls.predictions.bias", _VOCABULARY),
)


@functools.cache
def split_of(name: str) -> Split | None:
    """How the parameter `name`, and its moments, are split; None: every rank holds all of it."""
    return next((split for pattern, split in PLAN if fnmatchcase(name, pattern)), None)


def split_axis(name: str) -> int | None:
    """The axis along which the parameter `name` is split; None: every rank holds all of it."""
    split = split_of(name)
    return None if split is None else split.axis


def padded_length(length: int, size: int) -> int:
    """`length` rounded up to a multiple of `size`."""
    return -(-length // size) * size


def share(length: int, rank: int, size: int) -> slice:
    """The range of an axis that rank `rank` of `size` holds, without padding; may be empty."""
    each = padded_length(length, size) // size
    return slice(min(rank * each, length), min((rank + 1) * each, length))


def stored_shape(name: str, shape: tuple[int, ...], rank: int, size: int) -> tuple[int, ...]:
    """The shape of rank `rank`'s piece in its file, of the parameter `name` with the whole shape `shape`."""
    split = split_of(name)
    if split is None or size == 1:
        return shape
    piece = share(shape[split.axis], rank, size)
    return (*shape[: split.axis], piece.stop - piece.start, *shape[split.axis + 1 :])


def padded_shape(name: str, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """The shape of every rank's piece in training, padding included, of `name` with the whole shape `shape`."""
    split = split_of(name)
    if split is None or size == 1:
        return shape
    return (*shape[: split.axis], padded_length(shape[split.axis], size) // size, *shape[split.axis + 1 :])
