"""Contiguous, uncompressed HDF5 files, written reproducibly and read without HDF5.

The datasets of such a file lie at fixed offsets, so rows are written with `pwrite` and read through one memory map: no
HDF5 call per row, random access, and a full disk raises an ordinary OSError.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from common.errors import UserError
from common.files import replaced_durably

Array = NDArray[Any]
#: Shape and dtype of each dataset, in the order of the file.
Layout = Mapping[str, tuple[tuple[int, ...], Any]]

# Datasets begin on a page of their own, so mapped views are aligned and reading one does not touch another.
_ALIGNMENT_BYTES = 4096


class ContiguousWriter:
    """Writes rows of one file's datasets, in any order. Made by `contiguous_file`."""

    def __init__(self, fd: int, layout: Layout, offsets: Mapping[str, int]) -> None:
        self._fd, self._layout, self._offsets = fd, layout, offsets

    def write(self, key: str, start: int, values: Array) -> None:
        """Write `values` at rows `start`… of dataset `key`; raises OSError."""
        shape, dtype = self._layout[key]
        assert values.shape[1:] == shape[1:], f"{key}: {values.shape} in {shape}"
        assert start + len(values) <= shape[0], f"{key}: rows {start}+{len(values)} in {shape}"
        data = np.ascontiguousarray(values, dtype=dtype).reshape(-1).view(np.uint8).data
        row_bytes = np.dtype(dtype).itemsize * int(np.prod(shape[1:], dtype=np.int64))
        offset = self._offsets[key] + start * row_bytes
        while len(data):
            written = os.pwrite(self._fd, data, offset)
            data, offset = data[written:], offset + written


@contextlib.contextmanager
def contiguous_file(
    path: Path, layout: Layout, *, attributes: Mapping[str, str] | None = None
) -> Iterator[ContiguousWriter]:
    """Create the HDF5 file `path`, which the block fills; it appears whole and durable, or not at all.

    Raises: `DiskError`.
    """
    with replaced_durably(path) as temporary:
        with _system_errors():
            offsets = _allocate(temporary, layout, attributes or {})
        fd = os.open(temporary, os.O_WRONLY)
        try:
            yield ContiguousWriter(fd, layout, offsets)
            os.fsync(fd)
        finally:
            os.close(fd)


@contextlib.contextmanager
def _system_errors() -> Iterator[None]:
    """Raise OSError with the system's error number, which HDF5 hides in the text of its own exception."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        number = re.search(r"errno = (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


def _allocate(path: Path, layout: Layout, attributes: Mapping[str, str]) -> dict[str, int]:
    """Create `path` with unfilled space for all datasets; returns their byte offsets."""
    offsets = {}
    # libver and alignment fix the file's structure; without time stamps the same data gives the same bytes.
    with h5py.File(
        path, "w", libver=("earliest", "v108"), alignment_threshold=1024, alignment_interval=_ALIGNMENT_BYTES
    ) as file:
        for name, value in attributes.items():
            file.attrs[name] = value
        for key, (shape, dtype) in layout.items():
            properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            properties.set_layout(h5py.h5d.CONTIGUOUS)
            properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            properties.set_obj_track_times(False)
            kind, space = h5py.h5t.py_create(np.dtype(dtype)), h5py.h5s.create_simple(shape)
            dataset = h5py.h5d.create(file.id, key.encode(), kind, space, properties)
            offsets[key] = dataset.get_offset() or 0  # an empty dataset has no offset
    return offsets


@contextlib.contextmanager
def open_hdf5(path: Path) -> Iterator[Any]:
    """Open an HDF5 file for reading (`h5py.File`). Raises `UserError` for any error of HDF5 in the block."""
    if not path.is_file():
        raise UserError(f"{path} is missing; make or fetch it again")
    try:
        with h5py.File(path, "r", locking=False) as file:
            yield file
    except (OSError, RuntimeError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path} is not a whole HDF5 file ({reason}); make or fetch it again") from error


@dataclass(frozen=True)
class MappedDatasets:
    """Read-only views of the datasets of a file, through one memory map."""

    path: Path
    arrays: dict[str, Array]
    _map: mmap.mmap
    #: Where the last of them ends in the file.
    _end: int

    def checked(self) -> dict[str, Array]:
        """The arrays. Raises `UserError` if the file has been truncated: reading on would kill the process (SIGBUS).

        One `fstat`, cheap enough for each read of several rows.
        """
        size = self._map.size()
        if size < self._end:
            raise UserError(
                f"{self.path} has been cut short to {size} bytes, its datasets end at {self._end}; make or fetch it "
                f"again, then run the same command again"
            )
        return self.arrays


def map_contiguous(path: Path, file: Any, keys: tuple[str, ...]) -> MappedDatasets | None:
    """Views of datasets `keys` of the open `file`, which they outlive; None if any is not contiguous.

    Raises `UserError` if the file is too short for them.
    """
    places, end = {}, 0
    for key in keys:
        dataset = file[key]
        if dataset.id.get_create_plist().get_layout() != h5py.h5d.CONTIGUOUS:
            return None
        offset = dataset.id.get_offset()
        places[key] = (dataset.shape, dataset.dtype, offset)
        end = max(end, (offset or 0) + dataset.nbytes)
    with path.open("rb") as opened:
        whole = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    mapped = MappedDatasets(path, {}, whole, end)
    arrays = mapped.checked()
    for key, (shape, dtype, offset) in places.items():
        is_empty = offset is None
        arrays[key] = np.zeros(shape, dtype) if is_empty else np.ndarray(shape, dtype, buffer=whole, offset=offset)
    return mapped


#: A chunk is unpacked as a whole, however little of it is read.
_CHUNK_BYTES_MAX = 512 << 20


def require_own_dataset(path: Path, file: Any, key: str) -> None:
    """Raise `UserError` unless `key` in the open `file` is a dataset, and all of its content is in that file.

    HDF5 can also take content from other files, and returns zeros for what was never written.
    """
    link = file.get(key, getlink=True)
    if not isinstance(link, h5py.HardLink):
        raise _not_in(path, key, "is a link to a dataset elsewhere")
    dataset = file[key]
    if not isinstance(dataset, h5py.Dataset):
        raise UserError(f"{path}: {key} is not a dataset; this is no shard")
    if dataset.is_virtual or dataset.external:
        raise _not_in(path, key, "has its content in other files")
    if not dataset.size:
        return
    properties, chunk = dataset.id.get_create_plist(), dataset.chunks
    if chunk is None:
        is_whole = properties.get_layout() != h5py.h5d.CONTIGUOUS or dataset.id.get_offset() is not None
    else:
        chunk_bytes = math.prod(chunk) * dataset.dtype.itemsize
        if chunk_bytes > _CHUNK_BYTES_MAX:
            raise UserError(
                f"{path}: {key} has chunks of {chunk_bytes:,} bytes; at most {_CHUNK_BYTES_MAX:,} are read; write it "
                f"with smaller ones"
            )
        chunks = math.prod(-(-length // step) for length, step in zip(dataset.shape, chunk, strict=True))
        is_whole = dataset.id.get_num_chunks() == chunks
    if not is_whole:
        raise UserError(f"{path}: parts of {key} were never written; make or fetch it again")


def _not_in(path: Path, key: str, what: str) -> UserError:
    return UserError(f"{path}: {key} {what}, which is not followed; write all data into the shard itself")
