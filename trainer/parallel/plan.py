"""What tensor parallelism splits, and how: one table for training, merging and splitting. Pure data; imports no torch.

t is the tensor-parallel size, r a rank in 0 … t-1. Rank r holds the elements [r·⌈n/t⌉, (r+1)·⌈n/t⌉) of a split axis of
length n, as far as there are any. Attention heads, hidden and intermediate sizes must divide by t. The vocabulary need
not: in training every rank has ⌈V/t⌉ rows, and those past V, all at the very end, are padding. Files hold no padding,
so that the last ranks' are shorter and the whole is the ranks' pieces, one after the other.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from fnmatch import fnmatchcase

from common.errors import UserError
from trainer.config import ModelConfig


@dataclass(frozen=True)
class Split:
    """How a parameter is split."""

    #: Axis of the parameter, as torch stores it: (out, in).
    axis: int
    #: Parameters of one group are split together or not at all, in any model that works.
    group: str
    #: Whether the axis may be padded up to a multiple of t.
    padded: bool = False


_ATTENTION_COLUMN = Split(0, "attention")
_FEED_FORWARD_COLUMN = Split(0, "feed-forward")
_VOCABULARY = Split(0, "vocabulary", padded=True)

#: Pattern of Hugging Face's parameter names → split. The first that fits counts; what none fits is whole everywhere.
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
    """How the parameter `name` is split; None: it is whole on every rank. Its moments are split like it."""
    return next((split for pattern, split in PLAN if fnmatchcase(name, pattern)), None)


def split_axis(name: str) -> int | None:
    """The axis along which the parameter `name` is split; None: it is whole on every rank."""
    split = split_of(name)
    return None if split is None else split.axis


def padded_length(length: int, size: int) -> int:
    """The smallest multiple of `size` that is no less than `length`."""
    return -(-length // size) * size


def share(length: int, rank: int, size: int) -> slice:
    """The elements of an axis that rank `rank` of `size` holds, without padding; may be empty."""
    each = padded_length(length, size) // size
    return slice(min(rank * each, length), min((rank + 1) * each, length))


def stored_shape(name: str, shape: tuple[int, ...], rank: int, size: int) -> tuple[int, ...]:
    """The shape of rank `rank`'s piece of the parameter `name`, whose whole shape is `shape`, in its file."""
    split = split_of(name)
    if split is None or size == 1:
        return shape
    piece = share(shape[split.axis], rank, size)
    return (*shape[: split.axis], piece.stop - piece.start, *shape[split.axis + 1 :])


def padded_shape(name: str, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """The shape of any rank's piece of the parameter `name` in training: padding included, so the same for all."""
    split = split_of(name)
    if split is None or size == 1:
        return shape
    return (*shape[: split.axis], padded_length(shape[split.axis], size) // size, *shape[split.axis + 1 :])


def require_divisible(model: ModelConfig, size: int) -> None:
    """Raise `UserError` unless a model can be split `size` ways."""
    for name in ("num_attention_heads", "intermediate_size"):
        value = getattr(model, name)
        if value % size:
            raise UserError(
                f"tensor_parallel_size = {size} does not divide {name} = {value}: {value} / {size} = "
                f"{value / size:g}; choose a size that does"
            )
