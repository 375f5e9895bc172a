"""Limits on `torch.save` files, checked from their headers, in little memory, before anything is unpickled."""

from __future__ import annotations

import io
import pickletools
import re
import struct
import zipfile
from pathlib import Path
from typing import IO

from common.errors import CheckpointError

#: Size of the zip directory: 16 MiB are about 150,000 records; a BERT-Large with its optimizer has 1,200.
_DIRECTORY_MAX = 16 << 20
#: Size of the pickle, which holds names and shapes: BERT-Large's has 0.2 MB. Unpickling takes up to 60 times as much.
_PICKLE_MAX = 16 << 20
#: Types that a pickle can allocate by size alone, without holding their content.
_SIZED = re.compile(r"(__builtin__|builtins) bytearray|torch\S* (\w*Tensor|UntypedStorage|TypedStorage)")
_END, _END_64, _LOCATOR_64 = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"


def require_bounded(path: Path) -> None:
    """Raise `CheckpointError` if loading the zip archive `path` would take far more memory than a `torch.save` file.

    Files that are not zip archives are left to their reader.
    """
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":
            return
        size = _directory_size(file)
        if size is None:
            return  # truncated: torch reports it
        if size > _DIRECTORY_MAX:
            raise _unlike(path, f"lists its records in {size:,} bytes, more than {_DIRECTORY_MAX:,}")
        try:
            with zipfile.ZipFile(file) as archive:
                _require_plain(path, archive)
        except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, OverflowError):
            return  # damaged: torch reports it


def _require_plain(path: Path, archive: zipfile.ZipFile) -> None:
    for info in archive.infolist():
        # torch.save does not compress; a compressed record would expand in memory up to a thousandfold.
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise _unlike(path, f"packs its record {info.filename!r} ({info.file_size:,} bytes unpacked)")
        if info.filename.endswith("data.pkl"):
            if info.file_size > _PICKLE_MAX:
                raise _unlike(path, f"has a pickle of {info.file_size:,} bytes, more than {_PICKLE_MAX:,}")
            _require_no_sizes(path, archive.read(info))


def _require_no_sizes(path: Path, pickled: bytes) -> None:
    for opcode, argument, _ in pickletools.genops(io.BytesIO(pickled)):
        if opcode.name == "GLOBAL" and _SIZED.fullmatch(str(argument)):
            raise _unlike(path, f"creates a {str(argument).replace(' ', '.')} of a given size")


def _unlike(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} {what}; torch.save writes no such file, so none of it was read; copy it again")


def _directory_size(file: IO[bytes]) -> int | None:
    """Size in bytes of a zip's central directory, as declared; None without an end record."""
    length = file.seek(0, io.SEEK_END)
    start = file.seek(max(0, length - (64 << 10) - 22))
    tail = file.read()
    at = tail.rfind(_END)
    if at < 0 or len(tail) < at + 22:
        return None
    (size,) = struct.unpack_from("<L", tail, at + 12)
    if tail[max(0, at - 20) : at].startswith(_LOCATOR_64):
        (place,) = struct.unpack_from("<Q", tail, at - 20 + 8)
        # zipfile looks directly before the locator, torch at `place`; in torch.save's files both are the same.
        if place + 56 != start + at - 20:
            return _DIRECTORY_MAX + 1
        file.seek(place)
        end = file.read(56)
        if len(end) < 56 or not end.startswith(_END_64):
            return None
        (size,) = struct.unpack_from("<Q", end, 40)
    return int(size)
