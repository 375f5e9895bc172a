"""Read and write safetensors files one tensor at a time, in order, hashing on the way and without memory mapping.

Pages of a mapped file count as resident memory of the process; here data is read, hashed and written in one pass.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import CheckpointError
from common.files import HashingFile, durable_file

#: Names of the dtypes in safetensors headers.
DTYPES = {torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}
_TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
#: The library's own limit.
_MAX_HEADER_BYTES = 100_000_000
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Spec:
    """A tensor's dtype and shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Spec:
        return cls(tensor.dtype, tuple(tensor.shape))

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numel * self.dtype.itemsize


def bytes_of(tensor: Tensor) -> memoryview:
    """The content of a contiguous CPU tensor, without a copy."""
    view: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return view


class TensorWriter:
    """Writer of a safetensors file: `put` tensors in header order, whole or a few rows at a time."""

    def __init__(self, path: Path, specs: Mapping[str, Spec], file: HashingFile) -> None:
        self.path = path
        self._file = file
        self._specs = specs
        self._expected = iter(specs)
        self._name, self._missing_bytes = "", 0

    def put(self, name: str, rows: Tensor) -> None:
        if name != self._name:
            assert not self._missing_bytes, f"{self._name} lacks {self._missing_bytes} bytes before {name}"
            assert name == next(self._expected), name
            self._name, self._missing_bytes = name, self._specs[name].bytes
        assert rows.dtype == self._specs[name].dtype, f"{name} is {rows.dtype}"
        if rows.numel():
            view = bytes_of(rows.contiguous())
            self._file.write(view)
            self._missing_bytes -= len(view)

    @property
    def entry(self) -> dict[str, Any]:
        """{"path", "bytes", "sha256"} of the finished file."""
        return {"path": self.path.name, "bytes": self._file.bytes, "sha256": self._file.sha256}


@contextlib.contextmanager
def tensor_writer(path: Path, specs: Mapping[str, Spec], metadata: Mapping[str, str]) -> Iterator[TensorWriter]:
    """Write a safetensors file durably; the caller puts every tensor of `specs`. Raises `DiskError`."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, spec in specs.items():
        header[name] = {"dtype": DTYPES[spec.dtype], "shape": spec.shape, "data_offsets": [at, at + spec.bytes]}
        at += spec.bytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with durable_file(path) as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        writer = TensorWriter(path, specs, file)
        yield writer
        assert file.bytes == 8 + len(encoded) + at, f"{path} lacks tensors"


class TensorFile:
    """Reader of a safetensors file; given a `sha256`, `finish` verifies it.

    Raises `CheckpointError` if the file is not a complete safetensors file.
    """

    def __init__(self, path: Path, sha256: str | None = None) -> None:
        self.path = path
        self._sha256 = sha256
        self._digest = hashlib.sha256()
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise _unreadable(path, error) from error
        try:
            self._read_header()
        except BaseException:
            self._file.close()
            raise

    def _read_header(self) -> None:
        path = self.path
        try:
            size = os.fstat(self._file.fileno()).st_size
            raw = self._file.read(8)
            length = int.from_bytes(raw, "little")
            if len(raw) < 8 or length > min(size, _MAX_HEADER_BYTES):
                raise ValueError("no header")
            raw += self._file.read(length)
            header = json.loads(raw[8:])
            self.metadata: dict[str, str] = header.pop("__metadata__", {})
            places = {
                name: (Spec(_TORCH_DTYPES[entry["dtype"]], tuple(entry["shape"])), *entry["data_offsets"])
                for name, entry in header.items()
            }
        except OSError as error:
            raise _unreadable(path, error) from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{path} cannot be read as safetensors ({error}); use another checkpoint, or copy it here again"
            ) from error
        self._base = self._hashed = 8 + length
        self._digest.update(raw)
        ordered = sorted(places.items(), key=lambda item: item[1][1])
        for name, (spec, begin, end) in ordered:
            if end - begin != spec.bytes or begin < 0:
                raise CheckpointError(
                    f"{path}: the header gives {name} {end - begin} bytes, its shape needs {spec.bytes}"
                )
            if self._base + end > size:
                raise CheckpointError(
                    f"{path} is cut short: {name} ends at byte {self._base + end}, the file at {size}; copy it again"
                )
        self._size = size
        self._begins = {name: self._base + begin for name, (_, begin, _) in ordered}
        self.specs = {name: spec for name, (spec, _, _) in ordered}

    def where(self, name: str) -> str:
        return str(self.path)

    def read(self, name: str, start: int, out: Tensor) -> None:
        """Fill the contiguous `out` with the elements of the flattened tensor from `start` on."""
        if not out.numel():
            return
        view = bytes_of(out)
        at = self._begins[name] + start * out.element_size()
        for offset in range(0, len(view), _CHUNK_BYTES):
            self._read_chunk(at + offset, view[offset : offset + _CHUNK_BYTES])

    def _read_chunk(self, at: int, view: memoryview) -> None:
        count = 0
        while count < len(view):  # network file systems may give less than they were asked for
            try:
                read = os.preadv(self._file.fileno(), [view[count:]], at + count)
            except OSError as error:
                raise _unreadable(self.path, error) from error
            if not read:
                raise CheckpointError(f"{self.path} became shorter while it was read; use another checkpoint")
            count += read
        if self._sha256 is not None and at == self._hashed:
            self._digest.update(view)
            self._hashed += len(view)

    def finish(self) -> None:
        """Hash what was not read in order, and raise `CheckpointError` if the sha256 does not match."""
        if self._sha256 is None:
            return
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        while self._hashed < self._size:
            self._read_chunk(self._hashed, buffer[: self._size - self._hashed])
        if self._digest.hexdigest() != self._sha256:
            raise CheckpointError(
                f"{self.path} is damaged: its sha256 is not the manifest's; use another checkpoint, or copy it again"
            )

    def close(self) -> None:
        self._file.close()


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"cannot read {path}: {error.strerror}; check the path, or use another checkpoint")


def write_tensor_file(
    path: Path, tensors: Iterable[tuple[str, Tensor]], specs: Mapping[str, Spec], metadata: Mapping[str, str]
) -> dict[str, Any]:
    """Write all `tensors`, in the order of `specs`; returns {"path", "bytes", "sha256"}."""
    with tensor_writer(path, specs, metadata) as writer:
        for name, tensor in tensors:
            writer.put(name, tensor)
    return writer.entry
