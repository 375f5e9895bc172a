"""Sources of tensors: one object per file or tensor-parallel rank, read piece by piece.

Pickles are never executed: `torch.load(weights_only=True)` builds tensors and plain containers and refuses the rest.
It maps the files: their pages count as resident memory but belong to the page cache, which the kernel reclaims.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import torch
from torch import Tensor

from common.errors import CheckpointError
from trainer.checkpoint.interop.limits import require_bounded
from trainer.checkpoint.tensor_file import Spec


class Source(Protocol):
    """Named tensors whose contents stay on disk."""

    specs: dict[str, Spec]

    def where(self, name: str) -> str:
        """The file of a tensor, for messages."""

    def read(self, name: str, start: int, out: Tensor) -> None:
        """Fill the contiguous `out` with elements of the flattened tensor, from `start` on."""

    def finish(self) -> None:
        """Called after the last read; raises `CheckpointError` if the content is corrupt."""

    def close(self) -> None:
        """Release the files."""


class TensorReference:
    """Stand-in for torch_xla's class of this name in its serialized files: tensor `tid` has its own file."""

    tid: int


class Mapped:
    """Memory-mapped tensors of a file loaded with `torch.load`."""

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        self._path = path
        self._tensors = {name: t.detach() for name, t in tensors.items()}
        self.specs = {name: Spec.of(t) for name, t in tensors.items()}

    def where(self, name: str) -> str:
        return str(self._path)

    def read(self, name: str, start: int, out: Tensor) -> None:
        _copy(self._tensors[name], start, out)

    def finish(self) -> None:
        pass

    def close(self) -> None:
        self._tensors.clear()


class Referenced:
    """Tensors stored in one file each: FOLDER/tensor_<tid>.pt."""

    def __init__(self, folder: Path, references: Mapping[str, TensorReference]) -> None:
        self._paths = {name: folder / f"tensor_{int(reference.tid)}.pt" for name, reference in references.items()}
        self._loaded: tuple[str, Tensor] | None = None
        self.specs = {name: Spec.of(self._load(name)) for name in references}

    def _load(self, name: str) -> Tensor:
        path = self._paths[name]
        if not path.is_file():
            raise CheckpointError(f"{path} is missing: it holds {name}; copy the whole directory again")
        tensor = load_pickle(path)
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{path} should be the tensor {name} but is a {type(tensor).__name__}; copy it again")
        return tensor.detach()

    def where(self, name: str) -> str:
        return str(self._paths[name])

    def read(self, name: str, start: int, out: Tensor) -> None:
        if self._loaded is None or self._loaded[0] != name:
            self._loaded = name, self._load(name)
        _copy(self._loaded[1], start, out)

    def finish(self) -> None:
        pass

    def close(self) -> None:
        self._loaded = None


class Renamed:
    """A selection of tensors from other sources, renamed."""

    def __init__(self, places: Mapping[str, tuple[Source, str]]) -> None:
        self._places = dict(places)
        self.specs = {name: source.specs[original] for name, (source, original) in places.items()}

    def where(self, name: str) -> str:
        source, original = self._places[name]
        return source.where(original)

    def read(self, name: str, start: int, out: Tensor) -> None:
        source, original = self._places[name]
        source.read(original, start, out)

    def finish(self) -> None:
        for source in self._sources():
            source.finish()

    def close(self) -> None:
        for source in self._sources():
            source.close()

    def _sources(self) -> list[Source]:
        return list({id(source): source for source, _ in self._places.values()}.values())


def load_pickle(path: Path) -> Any:
    """Load a `torch.save` file with memory-mapped tensors. Raises `CheckpointError`."""
    require_bounded(path)
    stand_in: Any = [(TensorReference, "torch_xla.utils.serialization.TensorReference")]
    try:
        with torch.serialization.safe_globals(stand_in), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings on pickles not written by torch, refused below
            try:
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError as error:
                if "_use_new_zipfile_serialization" not in str(error):
                    raise
                # Files written by torch 1.5 or older cannot be mapped.
                return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle can raise anything
        found = re.search(r"GLOBAL ([\w.]+)", str(error)) if isinstance(error, UnpicklingError) else None
        if found:
            raise CheckpointError(
                f"{path} holds {found[1]}, which is neither a tensor nor a plain container; none of it was "
                f"executed, and it cannot be read"
            ) from error
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        if "weights_only" in reason:  # torch's message advises executing the file
            reason = "its pickle is not one of tensors and plain containers"
        raise CheckpointError(
            f"{path} is damaged, cut short or not written by torch.save ({reason}); copy it again"
        ) from error


def tensors_of(path: Path, value: Any, *, what: str) -> dict[str, Any]:
    """Return `value` if it is a dictionary of tensors or tensor references, else raise `CheckpointError`."""
    if not isinstance(value, dict) or not value:
        raise CheckpointError(f"{path}: {what} should hold tensors by name, but is a {type(value).__name__}")
    for name, tensor in value.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor | TensorReference):
            raise CheckpointError(f"{path}: {name} in {what} is a {type(tensor).__name__}, not a tensor")
    return value


def source_of(path: Path, tensors: Mapping[str, Any]) -> Source:
    """The source of the tensors or tensor references in the file `path`."""
    references = {name: value for name, value in tensors.items() if isinstance(value, TensorReference)}
    if not references:
        return Mapped(path, tensors)
    plain = {name: value for name, value in tensors.items() if name not in references}
    parts: list[Source] = [Referenced(path.with_name(path.name + ".tensors"), references)]
    if plain:
        parts.append(Mapped(path, plain))
    return Renamed({name: (part, name) for part in parts for name in part.specs})


def _copy(tensor: Tensor, start: int, out: Tensor) -> None:
    out.reshape(-1).copy_(tensor.reshape(-1)[start : start + out.numel()])
