"""Stream the regular files of an archive that may be damaged or hostile.

Nothing is written under a member's path, so `tarfile.data_filter` would add no protection: it checks the path, type
and link target of a header that tarfile has already parsed. The limits here apply before parsing.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import tarfile
import zlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, NoReturn

from common.errors import UserError, one_line
from common.zstd import zstd

#: Limits per archive: number of members, and unpacked bytes per compressed byte.
MEMBERS_MAX = 100_000
UNPACKED_RATIO_MAX = 200
_UNPACKED_MIN_BYTES = 1 << 30  # below this size the ratio is not checked

#: Limits on extended headers (PAX and GNU: long names and other text): bytes of one header, headers per member.
EXTENDED_HEADER_MAX = 64 << 10
_EXTENDED_IN_A_ROW_MAX = 8
#: Total bytes of extended headers: 1 KiB for each of `MEMBERS_MAX`.
_EXTENDED_HEADERS_MAX = 100 << 20
_EXTENDED = {
    tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK,
}  # fmt: skip

#: Memory limit for .xz decompression; `xz -9` needs 65 MiB.
_XZ_MEMORY_MAX = 128 << 20
_READ_BYTES = 1 << 20
_READ_ERRORS = (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError, zstd.ZstdError)


class DamagedArchive(UserError):
    """The archive is corrupt; data already read from it cannot be trusted either."""


@dataclass(frozen=True)
class Member:
    """A regular file in an archive."""

    name: str
    size: int
    #: Reads at most `count` further bytes; raises `DamagedArchive`.
    read: Callable[[int], bytes]


class _Refused(Exception):
    """A header exceeds a limit or has an unsupported type."""


class _Header(tarfile.TarInfo):
    """A header that is checked against the limits before tarfile reads its payload."""

    def _proc_member(self, tar: _Tar) -> _Header:
        """Called by tarfile for each 512-byte header block, and again for the header that follows an extended one."""
        if self.type in _EXTENDED:
            tar.count_extended(self)
        elif self.type in {tarfile.GNUTYPE_SPARSE}:
            self._refuse_sparse()
        return super()._proc_member(tar)  # type: ignore[misc, no-any-return]

    def _refuse_sparse(self, *_: object) -> NoReturn:
        raise _Refused("has a sparse file")

    # tarfile reads the map of a sparse file to its end, which a hostile archive need not have.
    _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _refuse_sparse

    @classmethod
    def fromtarfile(cls, tar: _Tar) -> _Header:  # type: ignore[override]
        try:
            return super().fromtarfile(tar)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            # The end-of-archive block. tarfile also accepts an archive truncated between two members.
            tar.end_was_seen = True
            raise


class _Tar(tarfile.TarFile):
    """A tar stream with limits on extended headers, which tarfile parses whole, in up to 400 times their memory."""

    tarinfo = _Header
    end_was_seen = False
    _extended_bytes = _extended_in_a_row = 0

    def count_extended(self, header: tarfile.TarInfo) -> None:
        """Count an extended header; raises `_Refused` beyond the limits."""
        self._extended_bytes += header.size
        self._extended_in_a_row += 1
        if not 0 <= header.size <= EXTENDED_HEADER_MAX:
            raise _Refused(f"has a header of {header.size:,} bytes, more than {EXTENDED_HEADER_MAX:,}")
        if header.type in {tarfile.XGLTYPE} and self._extended_bytes > EXTENDED_HEADER_MAX:
            raise _Refused("has more global headers than anybody writes")
        if self._extended_bytes > _EXTENDED_HEADERS_MAX or self._extended_in_a_row > _EXTENDED_IN_A_ROW_MAX:
            raise _Refused("has more headers than members need")

    def forget_member(self) -> None:
        """Drop the headers of the last member, which tarfile would keep for the whole archive."""
        self._extended_in_a_row, self.members = 0, list[tarfile.TarInfo]()


def members(archive: Path) -> Generator[Member, None, None]:
    """Yield the regular files of a .tar (plain, gz, bz2, xz or zst) in archive order; read each before the next.

    Raises `DamagedArchive`; `UserError` for a file that is not a tar, for links, devices and paths outside the
    destination, and beyond the limits above.
    """
    left = max(UNPACKED_RATIO_MAX * archive.stat().st_size, _UNPACKED_MIN_BYTES)
    with _open(archive) as (tar, stream):
        for number, info in enumerate(_headers(archive, tar, stream), 1):
            if number > MEMBERS_MAX:
                raise UserError(
                    f"{archive} has more than {MEMBERS_MAX} members; that is not a data set; unpack it by hand"
                )
            _refuse_unsafe(archive, info)
            if info.size < 0:
                _damaged(archive, ValueError(f"a size of {info.size}"), info.name)
            left -= info.size
            if left < 0:
                raise UserError(
                    f"{archive} unpacks to more than {UNPACKED_RATIO_MAX} times its size at member {info.name}; "
                    f"if it is a data set after all, unpack it by hand and give the folder"
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
def _open(archive: Path) -> Iterator[tuple[_Tar, IO[bytes]]]:
    """Open an archive: the tar reader and the decompressed stream under it."""
    with contextlib.ExitStack() as stack:
        try:
            stream: IO[bytes] = stack.enter_context(archive.open("rb"))
            magic = stream.read(6)
            stream.seek(0)
            for start, unpack in _UNPACKERS.items():
                if magic.startswith(start):
                    # In stream mode tarfile's own decompression does not verify the trailing checksum.
                    stream = stack.enter_context(unpack(stream))
            tar = _Tar.open(fileobj=stream, mode="r|", bufsize=_READ_BYTES)
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
    """Decompressed .xz content under a memory limit, which `lzma.LZMAFile` does not support."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._unpacker = lzma.LZMADecompressor(memlimit=_XZ_MEMORY_MAX)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            packed = b""
            if self._unpacker.eof:  # another stream may follow, after zero padding
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


def _not_unpacked(archive: Path, error: _Refused) -> UserError:
    return UserError(
        f"{archive} {error}; it is not unpacked: get the archive from a source you trust, or unpack it by hand and "
        f"give the folder"
    )


#: Magic number of a compressed file → its decompressor.
_UNPACKERS: dict[bytes, Callable[[IO[bytes]], Any]] = {
    b"\x1f\x8b": lambda stream: gzip.GzipFile(fileobj=stream),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\x00": lambda stream: io.BufferedReader(_Xz(stream), _READ_BYTES),
    b"\x28\xb5\x2f\xfd": zstd.ZstdFile,
}


def _headers(archive: Path, tar: _Tar, stream: IO[bytes]) -> Iterator[tarfile.TarInfo]:
    try:
        while (info := tar.next()) is not None:
            yield info
            tar.forget_member()
        while stream.read(_READ_BYTES):  # the checksum is at the end
            pass
    except _Refused as error:
        raise _not_unpacked(archive, error) from None
    except (*_READ_ERRORS, ValueError, OverflowError) as error:  # malformed numbers in a header
        _damaged(archive, error)
    if not tar.end_was_seen:
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
