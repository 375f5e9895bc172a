"""Unpacking archives that may be damaged or hostile: regular files by their base name, one after the other."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, NoReturn

from common.errors import UserError, one_line

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

#: What an archive may hold: more members, or more bytes for each of its own, are not a data set.
MEMBERS_MAX = 100_000
UNPACKED_RATIO_MAX = 200
_UNPACKED_MIN_BYTES = 1 << 30  # a small archive is never refused for its ratio

#: Bytes of a header that holds a long name or other text (PAX, GNU), and how many a member has before its own.
EXTENDED_HEADER_MAX = 64 << 10
_EXTENDED_IN_A_ROW_MAX = 8
#: Of all such headers: 1 KiB for each of the most members.
_EXTENDED_HEADERS_MAX = 100 << 20
_EXTENDED = (
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
)

#: Memory for unpacking .xz; `xz -9` needs 65 MiB.
_XZ_MEMORY_MAX = 128 << 20
_SPARSE, _GLOBAL = (tarfile.GNUTYPE_SPARSE,), (tarfile.XGLTYPE,)
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
    """A header of which nothing is read that is too large, and nothing kept from one member to the next."""

    def _proc_member(self, tarfile_: tarfile.TarFile) -> _Header:
        """Called with each block of 512 bytes that is a header; those with more behind them call it again."""
        if self.type in _EXTENDED:
            read: _ExtendedHeaders = tarfile_.extended_headers  # type: ignore[attr-defined]
            read.count(self)
        elif self.type in _SPARSE:
            raise _Refused("has a sparse file")
        return super()._proc_member(tarfile_)  # type: ignore[misc, no-any-return]

    def _refuse_sparse(self, *_: object) -> NoReturn:
        raise _Refused("has a sparse file")

    # The maps of such files are read to their end, which may be nowhere.
    _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _refuse_sparse

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> _Header:
        try:
            return super().fromtarfile(tarfile_)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            # tarfile takes an archive that was cut between two members for a whole one; only this marks its end.
            tarfile_.end_was_seen = True  # type: ignore[attr-defined]
            raise


class _Refused(Exception):
    """A header that is not read on."""


class _ExtendedHeaders:
    """What was read of headers that hold text: tarfile reads each whole and makes up to 400 times as much of it."""

    def __init__(self) -> None:
        self._bytes = self._in_a_row = 0

    def count(self, header: tarfile.TarInfo) -> None:
        """Raise `_Refused` if this one is too much."""
        self._bytes += header.size
        self._in_a_row += 1
        if not 0 <= header.size <= EXTENDED_HEADER_MAX:
            raise _Refused(f"has a header of {header.size:,} bytes, more than {EXTENDED_HEADER_MAX:,}")
        if header.type in _GLOBAL and self._bytes > EXTENDED_HEADER_MAX:
            raise _Refused("has more global headers than anybody writes")
        if self._bytes > _EXTENDED_HEADERS_MAX or self._in_a_row > _EXTENDED_IN_A_ROW_MAX:
            raise _Refused("has more headers than members need")

    def member_begins(self) -> None:
        self._in_a_row = 0


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
            if info.size < 0:
                _damaged(archive, ValueError(f"a size of {info.size}"), info.name)
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
            tar = _open_tar(stream)
        except _Refused as error:
            raise _not_unpacked(archive, error) from None
        except tarfile.TarError as error:
            raise UserError(
                f"{archive} is not a tar archive ({one_line(error)}); give .tar, .tar.gz or .tar.zst"
            ) from None
        except _READ_ERRORS as error:
            _damaged(archive, error)
        stack.callback(tar.close)
        yield tar, stream


class _Xz(io.RawIOBase):
    """What an .xz file unpacks to. `lzma.LZMAFile` would allow the file itself to name what memory that takes."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._unpacker = lzma.LZMADecompressor(memlimit=_XZ_MEMORY_MAX)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            packed = b""
            if self._unpacker.eof:  # another stream may follow, after zeros
                packed = self._unpacker.unused_data.lstrip(b"\0")
                while not packed:
                    more = self._stream.read(_READ_BYTES)
                    if not more:
                        return 0
                    packed = more.lstrip(b"\0")
                self._unpacker = lzma.LZMADecompressor(memlimit=_XZ_MEMORY_MAX)
            elif self._unpacker.needs_input:
                packed = self._stream.read(_READ_BYTES)
                if not packed:
                    raise EOFError("the end of the .xz stream is missing")
            unpacked = self._unpacker.decompress(packed, len(buffer))
            if unpacked:
                buffer[: len(unpacked)] = unpacked
                return len(unpacked)


class _Tar(tarfile.TarFile):
    """Knows, from its first header on, what was read of extended ones, and whether its end was."""

    extended_headers: _ExtendedHeaders
    end_was_seen: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.extended_headers, self.end_was_seen = _ExtendedHeaders(), False
        super().__init__(*args, **kwargs)


def _open_tar(stream: IO[bytes]) -> tarfile.TarFile:
    return _Tar.open(fileobj=stream, mode="r|", tarinfo=_Header, bufsize=_READ_BYTES)


def _not_unpacked(archive: Path, error: _Refused) -> UserError:
    return UserError(
        f"{archive} {error}; it is not unpacked: get the archive from a source you trust, or unpack it by hand and "
        f"give the folder"
    )


#: First bytes of a packed file → what unpacks it.
_UNPACKERS: dict[bytes, Callable[[IO[bytes]], Any]] = {
    b"\x1f\x8b": lambda stream: gzip.GzipFile(fileobj=stream),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\x00": lambda stream: io.BufferedReader(_Xz(stream), _READ_BYTES),
    b"\x28\xb5\x2f\xfd": zstd.ZstdFile,
}


def _headers(archive: Path, tar: tarfile.TarFile, stream: IO[bytes]) -> Iterator[tarfile.TarInfo]:
    try:
        while (info := tar.next()) is not None:
            yield info
            tar.extended_headers.member_begins()  # type: ignore[attr-defined]
            tar.members = []  # type: ignore[attr-defined]  # it would remember every header
        while stream.read(_READ_BYTES):  # to the end, where the checksum is
            pass
    except _Refused as error:
        raise _not_unpacked(archive, error) from None
    except (*_READ_ERRORS, ValueError, OverflowError) as error:  # numbers that are none
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
