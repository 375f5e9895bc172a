"""Where tensors come from: one object for the tensors of one file, or of one tensor-parallel rank, read piece by piece.

Pickles are never executed: `torch.load(weights_only=True)` builds tensors and plain containers and refuses the rest.
"""

from __future__ import annotations

import ctypes
import mmap
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
    """Tensors under names, without their contents in memory."""

    specs: dict[str, Spec]

    def where(self, name: str) -> str:
        """What to call the place of a tensor in a message."""

    def read(self, name: str, start: int, out: Tensor) -> None:
        """Copy the elements from `start` on, of the tensor laid out flat, into the contiguous `out`."""

    def finish(self) -> None:
        """Everything was read: raise `CheckpointError` if it was not what it should have been."""

    def close(self) -> None:
        """Nothing is read any more."""


class TensorReference:
    """Stands in for torch_xla's class of that name in files it serialised: tensor `tid` is in a file of its own."""

    tid: int


class Mapped:
    """Tensors of a `torch.load`ed file that is mapped into memory; pages are given back once they were read."""

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        self._path = path
        self._tensors = {name: t.detach() for name, t in tensors.items()}
        regions = _regions(path)
        self._is_mapped = {name: _is_in(t, regions) for name, t in self._tensors.items()}
        self.specs = {name: Spec.of(t) for name, t in tensors.items()}

    def where(self, name: str) -> str:
        return str(self._path)

    def read(self, name: str, start: int, out: Tensor) -> None:
        _copy(self._tensors[name], start, out, give_back=self._is_mapped[name])

    def finish(self) -> None:
        pass

    def close(self) -> None:
        self._tensors.clear()


class Referenced:
    """Tensors that are each in a file of their own: FOLDER/tensor_<tid>.pt."""

    def __init__(self, folder: Path, references: Mapping[str, TensorReference]) -> None:
        self._paths = {name: folder / f"tensor_{int(reference.tid)}.pt" for name, reference in references.items()}
        self._loaded: tuple[str, Tensor, bool] | None = None
        self.specs = {name: Spec.of(self._load(name)) for name in references}

    def _load(self, name: str) -> Tensor:
        path = self._paths[name]
        if not path.is_file():
            raise CheckpointError(f"{path} is missing: it holds {name}; copy the whole directory again")
        tensor = load_pickle(path)
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{path} should be the tensor {name} and is a {type(tensor).__name__}; copy it again")
        return tensor.detach()

    def where(self, name: str) -> str:
        return str(self._paths[name])

    def read(self, name: str, start: int, out: Tensor) -> None:
        if self._loaded is None or self._loaded[0] != name:
            tensor = self._load(name)
            self._loaded = name, tensor, _is_in(tensor, _regions(self._paths[name]))
        _copy(self._loaded[1], start, out, give_back=self._loaded[2])

    def finish(self) -> None:
        pass

    def close(self) -> None:
        self._loaded = None


class Renamed:
    """Some tensors of other sources, under other names."""

    def __init__(self, places: Mapping[str, tuple[Source, str]]) -> None:
        self._places = dict(places)
        self.specs = {name: source.specs[there] for name, (source, there) in places.items()}

    def where(self, name: str) -> str:
        source, there = self._places[name]
        return source.where(there)

    def read(self, name: str, start: int, out: Tensor) -> None:
        source, there = self._places[name]
        source.read(there, start, out)

    def finish(self) -> None:
        for source in self._sources():
            source.finish()

    def close(self) -> None:
        for source in self._sources():
            source.close()

    def _sources(self) -> list[Source]:
        return list({id(source): source for source, _ in self._places.values()}.values())


def load_pickle(path: Path) -> Any:
    """What `torch.save` wrote, its tensors mapped rather than read. Raises `CheckpointError`."""
    require_bounded(path)
    stand_in: Any = [(TensorReference, "torch_xla.utils.serialization.TensorReference")]
    try:
        with torch.serialization.safe_globals(stand_in), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a pickle that is not torch's, which is refused
            try:
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError as error:
                if "_use_new_zipfile_serialization" not in str(error):
                    raise
                # Written by torch 1.5 or older: such a file can only be read as a whole.
                return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle makes anything of its reader
        found = re.search(r"GLOBAL ([\w.]+)", str(error)) if isinstance(error, UnpicklingError) else None
        if found:
            raise CheckpointError(
                f"{path} holds {found[1]}, which is neither a tensor nor a plain container; nothing of it was "
                f"executed, and it cannot be read"
            ) from error
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        if "weights_only" in reason:  # torch advises to execute it
            reason = "its pickle is not one of tensors and plain containers"
        raise CheckpointError(
            f"{path} is damaged, cut short or not written by torch.save ({reason}); copy it again"
        ) from error


def tensors_of(path: Path, value: Any, *, what: str) -> dict[str, Any]:
    """`value` if it is a dictionary of tensors, or of references to them. Raises `CheckpointError` otherwise."""
    if not isinstance(value, dict) or not value:
        raise CheckpointError(f"{path}: {what} should hold tensors by name, it is a {type(value).__name__}")
    for name, tensor in value.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor | TensorReference):
            raise CheckpointError(f"{path}: {name} in {what} is a {type(tensor).__name__}, not a tensor")
    return value


def source_of(path: Path, tensors: Mapping[str, Any]) -> Source:
    """The source for tensors, or for references to them, that were found in the file `path`."""
    references = {name: value for name, value in tensors.items() if isinstance(value, TensorReference)}
    if not references:
        return Mapped(path, tensors)
    plain = {name: value for name, value in tensors.items() if name not in references}
    parts: list[Source] = [Referenced(path.with_name(path.name + ".tensors"), references)]
    if plain:
        parts.append(Mapped(path, plain))
    return Renamed({name: (part, name) for part in parts for name in part.specs})


_MADV_DONTNEED = 4
_libc = ctypes.CDLL(None, use_errno=True)


def _copy(tensor: Tensor, start: int, out: Tensor, *, give_back: bool) -> None:
    """Copy elements of a loaded tensor; of one that is a mapped file the pages can be given back."""
    piece = tensor.reshape(-1)[start : start + out.numel()]
    out.reshape(-1).copy_(piece)
    if give_back:
        _give_back(piece)


def _regions(path: Path) -> list[range]:
    """Where in this process's memory the file `path` is mapped; nowhere, if the system does not tell (Linux does)."""
    found, name = [], str(path.resolve())
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    for line in lines:
        if line.endswith(name):
            begin, end = (int(address, 16) for address in line.split(maxsplit=1)[0].split("-"))
            found.append(range(begin, end))
    return found


def _is_in(tensor: Tensor, regions: list[range]) -> bool:
    """Whether the memory of a tensor is in one of `regions`, so that the kernel can drop it and read it again."""
    return tensor.is_contiguous() and any(tensor.data_ptr() in region for region in regions)


def _give_back(piece: Tensor) -> None:
    """Drop the whole pages of a piece of a mapped file, which nobody has written to, from this process's memory."""
    begin = -(-piece.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (piece.data_ptr() + piece.numel() * piece.element_size()) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > begin:
        _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_DONTNEED)
