"""What a file of `torch.save` may be before anything of it is unpacked: checked by its headers, in little memory."""

from __future__ import annotations

import io
import pickletools
import re
import struct
import zipfile
from pathlib import Path
from typing import IO

from common.errors import CheckpointError

#: Of the zip's list of records: 16 MiB are about 150,000; a BERT-Large with its optimizer has 1,200.
_DIRECTORY_MAX = 16 << 20
#: Of the pickle, which holds names and shapes: BERT-Large's has 0.2 MB. Unpickled it takes up to 60 times as much.
_PICKLE_MAX = 16 << 20
#: What a pickle could have made of any size without holding its content.
_SIZED = re.compile(r"(__builtin__|builtins) bytearray|torch\S* (\w*Tensor|UntypedStorage|TypedStorage)")
_END, _END_64, _LOCATOR_64 = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"


def require_bounded(path: Path) -> None:
    """Raise `CheckpointError` if the zip archive `path` would take much more memory than `torch.save`'s own; any
    other file is left to its reader."""
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":
            return
        size = _directory_size(file)
        if size is None:
            return  # cut short: torch says so
        if size > _DIRECTORY_MAX:
            raise _unlike(path, f"lists its records in {size:,} bytes, more than {_DIRECTORY_MAX:,}")
        try:
            with zipfile.ZipFile(file) as archive:
                _require_plain(path, archive)
        except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, OverflowError):
            return  # damaged: torch says so


def _require_plain(path: Path, archive: zipfile.ZipFile) -> None:
    for info in archive.infolist():
        # torch.save stores: a packed record would be unpacked as a whole, a thousand times as large.
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise _unlike(path, f"packs its record {info.filename!r} ({info.file_size:,} bytes unpacked)")
        if info.filename.endswith("data.pkl"):
            if info.file_size > _PICKLE_MAX:
                raise _unlike(path, f"has a pickle of {info.file_size:,} bytes, more than {_PICKLE_MAX:,}")
            _require_no_sizes(path, archive.read(info))


def _require_no_sizes(path: Path, pickled: bytes) -> None:
    for opcode, argument, _ in pickletools.genops(io.BytesIO(pickled)):
        if opcode.name == "GLOBAL" and _SIZED.fullmatch(str(argument)):
            raise _unlike(path, f"makes a {str(argument).replace(' ', '.')} by its size")


def _unlike(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} {what}; torch.save writes no such file, so nothing of it was read; copy it again")


def _directory_size(file: IO[bytes]) -> int | None:
    """Bytes of the list of records at a zip's end, as it says itself; None: it has no end."""
    length = file.seek(0, io.SEEK_END)
    start = file.seek(max(0, length - (64 << 10) - 22))
    tail = file.read()
    at = tail.rfind(_END)
    if at < 0 or len(tail) < at + 22:
        return None
    (size,) = struct.unpack_from("<L", tail, at + 12)
    if tail[max(0, at - 20) : at].startswith(_LOCATOR_64):
        (place,) = struct.unpack_from("<Q", tail, at - 20 + 8)
        # zipfile looks right before the locator, torch at `place`: a file of torch.save has it at both.
        if place + 56 != start + at - 20:
            return _DIRECTORY_MAX + 1
        file.seek(place)
        end = file.read(56)
        if len(end) < 56 or not end.startswith(_END_64):
            return None
        (size,) = struct.unpack_from("<Q", end, 40)
    return int(size)
