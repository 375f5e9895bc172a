"""Unpacking archives that may be damaged or hostile: regular files by their base name, one after the other."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import lzma
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, NoReturn

from trainer.errors import UserError, one_line

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

#: What an archive may hold: more members, or more bytes for each of its own, are not a data set.
MEMBERS_MAX = 100_000
UNPACKED_RATIO_MAX = 200
_UNPACKED_MIN_BYTES = 1 << 30  # a small archive is never refused for its ratio

_READ_BYTES = 1 << 20
_READ_ERRORS = (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError, zstd.ZstdError)


class DamagedArchive(UserError):
    """What an archive holds cannot be trusted, not even what was read of it already."""


@dataclass(frozen=True)
class Member:
    """A regular file in an archive."""

    name: str
    size: int
    #: Reads the next so many bytes; raises `UserError` if the archive is damaged.
    read: Callable[[int], bytes]


class _Header(tarfile.TarInfo):
    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> _Header:
        try:
            return super().fromtarfile(tarfile_)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            # tarfile takes an archive that was cut between two members for a whole one; only this marks its end.
            tarfile_.end_was_seen = True  # type: ignore[attr-defined]
            raise


def members(archive: Path) -> Iterator[Member]:
    """The regular files of a .tar (plain, gz, bz2, xz or zst), in their order; each must be read before the next.

    Raises `DamagedArchive`; `UserError`: not a tar, members that are links, devices or leave the folder, more than
    the limits above.
    """
    left = max(UNPACKED_RATIO_MAX * archive.stat().st_size, _UNPACKED_MIN_BYTES)
    with _open(archive) as (tar, stream):
        for number, info in enumerate(_headers(archive, tar, stream), 1):
            if number > MEMBERS_MAX:
                raise UserError(
                    f"{archive} has more than {MEMBERS_MAX} members; that is no data set; unpack it by hand"
                )
            _refuse_unsafe(archive, info)
            left -= info.size
            if left < 0:
                raise UserError(
                    f"{archive} unpacks to more than {UNPACKED_RATIO_MAX} times its size at member {info.name}; "
                    f"if it is a data set nevertheless, unpack it by hand and give the folder"
                )
            if info.isfile():
                file = tar.extractfile(info)
                assert file is not None
                yield Member(info.name, info.size, _reader(archive, info.name, file))


def _refuse_unsafe(archive: Path, info: tarfile.TarInfo) -> None:
    path = PurePosixPath(info.name)
    reason = (
        "an absolute path" if path.is_absolute()
        else "a path with '..'" if ".." in path.parts
        else "a link" if info.issym() or info.islnk()
        else "a sparse file" if info.issparse()
        else None if info.isfile() or info.isdir()
        else "a device or pipe"
    )  # fmt: skip
    if reason is not None:
        raise UserError(
            f"{archive} has the member {info.name!r}, {reason}; only plain files and folders are unpacked; "
            f"get the archive from a source you trust, or unpack it by hand and give the folder"
        )


@contextlib.contextmanager
def _open(archive: Path) -> Iterator[tuple[tarfile.TarFile, IO[bytes]]]:
    """The tar in an archive, and the unpacked stream that it is read from."""
    with contextlib.ExitStack() as stack:
        try:
            stream: IO[bytes] = stack.enter_context(archive.open("rb"))
            magic = stream.read(6)
            stream.seek(0)
            for start, unpack in _UNPACKERS.items():
                if magic.startswith(start):
                    # Ours and not tarfile's own, which does not look at the checksum at the end.
                    stream = stack.enter_context(unpack(stream))
            tar = tarfile.open(fileobj=stream, mode="r|", tarinfo=_Header, bufsize=_READ_BYTES)  # noqa: SIM115
        except tarfile.TarError as error:
            raise UserError(
                f"{archive} is not a tar archive ({one_line(error)}); give .tar, .tar.gz or .tar.zst"
            ) from None
        except _READ_ERRORS as error:
            _damaged(archive, error)
        tar.end_was_seen = False  # type: ignore[attr-defined]
        stack.callback(tar.close)
        yield tar, stream


#: First bytes of a packed file → what unpacks it.
_UNPACKERS: dict[bytes, Callable[[IO[bytes]], Any]] = {
    b"\x1f\x8b": lambda stream: gzip.GzipFile(fileobj=stream),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\x00": lzma.LZMAFile,
    b"\x28\xb5\x2f\xfd": zstd.ZstdFile,
}


def _headers(archive: Path, tar: tarfile.TarFile, stream: IO[bytes]) -> Iterator[tarfile.TarInfo]:
    try:
        while (info := tar.next()) is not None:
            yield info
            tar.members = []  # type: ignore[attr-defined]  # it would remember every header
        while stream.read(_READ_BYTES):  # to the end, where the checksum is
            pass
    except _READ_ERRORS as error:
        _damaged(archive, error)
    if not tar.end_was_seen:  # type: ignore[attr-defined]
        _damaged(archive, EOFError("the end is missing"))


def _reader(archive: Path, name: str, file: IO[bytes]) -> Callable[[int], bytes]:
    def read(count: int) -> bytes:
        try:
            return file.read(count)
        except _READ_ERRORS as error:
            _damaged(archive, error, name)

    return read


def _damaged(archive: Path, error: Exception, name: str = "") -> NoReturn:
    where = f" in member {name}" if name else ""
    raise DamagedArchive(f"{archive} is damaged or cut off{where} ({one_line(error)}); fetch it again") from None
