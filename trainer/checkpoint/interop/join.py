"""Join shards into whole tensors, a few rows at a time, with checks; all formats are read this way.

Shapes tell which tensors are split: a rank holds either the whole parameter or its shard as cut by
`trainer/parallel/plan.py`. Other tools split fewer groups of parameters, so any group may be whole, but the parameters
of a group must agree.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from math import prod
from typing import NoReturn

import torch
from torch import Tensor

from common.errors import CheckpointError
from trainer.checkpoint.interop.chunks import Chunk, read_ahead
from trainer.checkpoint.interop.contents import MODEL, OPTIMIZER, Contents
from trainer.checkpoint.interop.infer import conflicts, infer_model
from trainer.checkpoint.interop.names import TIED, moment_names, parameter_shapes
from trainer.checkpoint.interop.sources import Source
from trainer.checkpoint.tensor_file import DTYPES, Spec
from trainer.models.bert import has_next_sentence_head
from trainer.models.config import ModelConfig
from trainer.parallel.plan import padded_shape, split_of, stored_shape

#: Groups that may be partly split: other tools leave the decoder's bias whole.
_LOOSE_GROUPS = ("vocabulary",)


class Checkpoint:
    """Whole parameters and moments of a checkpoint. Raises `CheckpointError` if anything in it is inconsistent."""

    def __init__(self, contents: Contents, config: ModelConfig | None = None) -> None:
        """`config`: the model, if known; otherwise it is taken from the files or inferred."""
        self.contents = contents
        for difference in conflicts(config, contents.config) if config and contents.config else ():
            raise CheckpointError(f"{contents.path} holds another model: its {difference}; give another checkpoint")
        self.config = config or contents.config or infer_model(contents)
        has_head = has_next_sentence_head(contents.model[0].specs)
        # Other tools' configs do not tell (`ModelConfig`); ours do, and a damaged checkpoint may lack the head.
        next_sentence = contents.config.next_sentence if contents.config and contents.format == "native" else has_head
        self.config = dataclasses.replace(self.config, next_sentence=next_sentence)
        self._shapes = parameter_shapes(self.config)
        self._require_names(contents.model, set(self._shapes))
        self._axes = {name: self._axis(contents.model, name, name) for name in self._shapes}
        self._require_whole_groups()
        self._specs = {MODEL: self._model_specs(), OPTIMIZER: self._optimizer_specs()}

    @property
    def with_optimizer(self) -> bool:
        return bool(self.contents.optimizer)

    def specs(self, kind: str) -> dict[str, Spec]:
        """Specs of the whole tensors of a kind (`MODEL`, `OPTIMIZER`), in the order of `stream`."""
        return self._specs[kind]

    def stream(self, kind: str) -> Iterator[Chunk]:
        """Yield every tensor of a kind in chunks, in order.

        The files' sha256 is checked after the last chunk, so do not use a partial stream.
        """
        yield from read_ahead(self._specs[kind], functools.partial(self._fill, kind))
        for source in self.contents.sources(kind):
            source.finish()

    def close(self) -> None:
        self.contents.close()

    # Names, shapes and dtypes.

    def _require_names(self, ranks: Sequence[Source], expected: set[str]) -> None:
        for source in ranks:
            for name in sorted(expected ^ set(source.specs)):
                if name in expected:
                    where = source.where(next(iter(source.specs), name)) if source.specs else self.contents.path
                    raise CheckpointError(f"{where} lacks {name}, which its model has; give another checkpoint")
                raise CheckpointError(f"{source.where(name)} holds {name}, which its model does not have")
            for name in sorted(expected):
                spec, first = source.specs[name], ranks[0].specs[name]
                if not spec.dtype.is_floating_point or spec.dtype != first.dtype or spec.dtype not in DTYPES:
                    other = f", on rank 0 it is {first.dtype}" if spec.dtype != first.dtype else ""
                    raise CheckpointError(
                        f"{source.where(name)}: {name} is {spec.dtype}{other}; allowed: one floating-point type"
                    )

    def _axis(self, ranks: Sequence[Source], name: str, parameter: str) -> int | None:
        """The axis along which `name` (`parameter`, or a tensor with its layout) is split; None if it is whole."""
        full, size = self._shapes[TIED.get(parameter, parameter)], len(ranks)
        pieces = [source.specs[name].shape for source in ranks]
        split = split_of(parameter) if size > 1 else None
        native = self.contents.format == "native"
        if all(piece == full for piece in pieces) and not (native and split):
            return None
        if split is not None:
            stored = [stored_shape(parameter, full, rank, size) for rank in range(size)]
            padded = [padded_shape(parameter, full, size)] * size
            if pieces == stored or (split.padded and pieces == padded and not native):
                return split.axis
        self._refuse_shapes(ranks, name, parameter, pieces)

    def _refuse_shapes(
        self, ranks: Sequence[Source], name: str, parameter: str, pieces: list[tuple[int, ...]]
    ) -> NoReturn:
        full, size = self._shapes[TIED.get(parameter, parameter)], len(ranks)
        rank = next((rank for rank, piece in enumerate(pieces) if piece != pieces[0]), 0)
        split = split_of(parameter)
        allowed = [f"{full} whole"]
        if split is not None and size > 1:
            allowed.append(f"{padded_shape(parameter, full, size)} on each of {size} ranks")
        hint = ""
        if split is not None and len(pieces[0]) == len(full) and 0 < pieces[0][split.axis] < full[split.axis]:
            count = -(-full[split.axis] // pieces[0][split.axis])
            hint = f" (a share of {count} ranks: are shards missing?)" if count > size else ""
        raise CheckpointError(
            f"{ranks[rank].where(name)}: {name} has shape {pieces[rank]}{hint}, its model needs "
            f"{' or '.join(allowed)}; give a matching config.json or checkpoint"
        )

    def _require_whole_groups(self) -> None:
        first: dict[str, str] = {}
        for name, axis in self._axes.items():
            split = split_of(name)
            if split is None or split.group in _LOOSE_GROUPS:
                continue
            other = first.setdefault(split.group, name)
            if (axis is None) != (self._axes[other] is None):
                whole, pieces = (name, other) if axis is None else (other, name)
                raise CheckpointError(
                    f"{self.contents.path}: {whole} is whole on every rank and {pieces} is split, which no model does; "
                    f"give a matching config.json or checkpoint"
                )

    def _model_specs(self) -> dict[str, Spec]:
        first = self.contents.model[0].specs
        # Native files keep their order, so that splitting and merging reproduce the same bytes.
        order = first if self.contents.format == "native" else self._shapes
        return {name: Spec(first[name].dtype, self._shapes[name]) for name in order}

    def _optimizer_specs(self) -> dict[str, Spec]:
        ranks = self.contents.optimizer
        if not ranks:
            return {}
        names = moment_names(self._shapes, ranks[0].specs)
        self._require_names(ranks, set(names))
        for name in names:
            parameter = name.split(".", 1)[1]
            if self._axis(ranks, name, parameter) != self._axes[parameter]:
                raise CheckpointError(f"{ranks[0].where(name)}: {name} is not split as its parameter is")
        first = ranks[0].specs
        order = first if self.contents.format == "native" else names
        return {name: Spec(first[name].dtype, self._shapes[name.split(".", 1)[1]]) for name in order}

    # Tensor contents.

    def _fill(self, kind: str, chunk: Chunk) -> None:
        """Fill a chunk's rows from the files of all ranks, and check them."""
        ranks, name, row, rows = self.contents.sources(kind), chunk.name, chunk.row, chunk.rows
        axis = self._axes[name if kind == MODEL else name.split(".", 1)[1]]
        if axis is None:
            ranks[0].read(name, row * _row_elements(rows), rows)
            self._require_same(ranks, chunk)
        elif axis == 0:
            for rank, start, part in _shares(ranks, name, row, rows):
                ranks[rank].read(name, start * _row_elements(part), part)
        else:
            columns = rows.split([source.specs[name].shape[1] for source in ranks], dim=1)
            for source, part in zip(ranks, columns, strict=True):
                _read_columns(source, name, row, part)
        if kind == MODEL:
            self._require_tied(chunk)
        require_finite(f"{self.contents.path}: {name}", rows)

    def _require_same(self, ranks: Sequence[Source], chunk: Chunk) -> None:
        """Raise `CheckpointError` unless every rank holds the same rows as `chunk`, which was read from rank 0."""
        for rank, source in enumerate(ranks[1:], 1):
            if not _holds(source, chunk.name, chunk.row, chunk.rows):
                raise CheckpointError(
                    f"{source.where(chunk.name)}: {chunk.name} differs from that in {ranks[0].where(chunk.name)}, but "
                    f"ranks 0 and {rank} must agree on it; these are not the shards of one save"
                )

    def _require_tied(self, chunk: Chunk) -> None:
        """Raise `CheckpointError` unless the aliases of a parameter hold the same rows."""
        for alias, ranks in self.contents.tied.items():
            if TIED[alias] != chunk.name:
                continue
            whole = self._axis(ranks, alias, alias) is None
            parts = (
                [(rank, chunk.row, chunk.rows) for rank in range(len(ranks))]
                if whole
                else _shares(ranks, alias, chunk.row, chunk.rows)
            )
            for rank, start, part in parts:
                if not _holds(ranks[rank], alias, start, part):
                    raise CheckpointError(
                        f"{ranks[rank].where(alias)}: {alias} differs from {chunk.name}; only models that tie the two "
                        f"can be read"
                    )


def _row_elements(rows: Tensor) -> int:
    return prod(rows.shape[1:])


def _shares(ranks: Sequence[Source], name: str, row: int, rows: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """Yield (rank, first row in its shard, slice of `rows`) for a tensor split by rows."""
    first = 0
    for rank, source in enumerate(ranks):
        held = source.specs[name].shape[0]
        start, stop = max(row, first), min(row + len(rows), first + held)
        if start < stop:
            yield rank, start - first, rows[start - row : stop - row]
        first += held


def _read_columns(source: Source, name: str, row: int, out: Tensor) -> None:
    """Fill the strided `out` with rows of a rank that holds some of the columns."""
    piece = torch.empty_like(out, memory_format=torch.contiguous_format)
    source.read(name, row * out.shape[1], piece)
    out.copy_(piece)


def _holds(source: Source, name: str, row: int, expected: Tensor) -> bool:
    """Whether a source's rows from `row` on equal `expected` bit for bit."""
    found = torch.empty_like(expected)
    source.read(name, row * _row_elements(expected), found)
    return torch.equal(found.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))


def require_finite(what: str, tensor: Tensor) -> None:
    """Raise `CheckpointError` if `tensor` holds a NaN or an infinity."""
    # Non-finite values make the sum non-finite, and a sum costs a tenth of an elementwise check. A sum of finite values
    # may overflow, hence the second check.
    total = tensor.sum(dtype=torch.float64 if tensor.dtype == torch.float64 else torch.float32)
    if not torch.isfinite(total) and not torch.isfinite(tensor).all():
        raise CheckpointError(f"{what} holds values that are not finite; give an earlier checkpoint")
