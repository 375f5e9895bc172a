"""The interface of a document source, and the base class of file sources: compression, damage, truncation."""

from __future__ import annotations

import contextlib
import gzip
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Protocol

from common.errors import UserError
from common.hashing import InputFile
from common.process import available_cores

_BLOCK_BYTES = 1 << 20
#: Extensions of compressed files, after that of their format.
PACKED = (".gz", ".bz2", ".zst")
#: Decompression threads for a .bz2 file (six keep up with the XML parser), and the chunk size of each: the library's
#: default of 4 MiB took three times the memory and was 20 % faster.
_BZ2_THREADS, _BZ2_CHUNK_BYTES = 6, 1 << 20
#: A document longer than this many characters is split at a line end, which bounds memory.
DOCUMENT_CHARACTERS_MAX = 4 << 20
#: The largest window of a .zst file (`zstd --ultra --long=31`, 2 GiB); most need 8 MiB or less.
_ZSTD_WINDOW_LOG_MAX = 31
#: Assumed compression ratio of packed text, slightly below what is typical.
_PACKED_RATIO = 3
#: Longer lines inside a record's text are cut, because sentences are split line by line.
_RECORD_LINE_CHARACTERS = 1 << 20
#: Lines that show nothing but are not white space either, which would end a document.
CONTROL_LINES = "lines: control characters only"
_VISIBLE = re.compile(r"[^\s\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028\u2029\u2060\ufeff]")


class Markup(Protocol):
    """A document still in markup; extracting its text is expensive, so the worker that needs the text does it."""

    def __len__(self) -> int:
        """Number of characters, including markup."""

    def text(self, dropped: Counter[str]) -> str:
        """The text, one paragraph or sentence per line, or ''; counts what is dropped by reason in `dropped`."""


#: What a source yields: text, one paragraph or sentence per line, or markup that any process can turn into text.
Document = str | Markup


def text_of(document: Document, dropped: Counter[str]) -> str:
    return document if isinstance(document, str) else document.text(dropped)


class Source(Protocol):
    """A source of documents."""

    @property
    def name(self) -> str:
        """Name used in messages."""

    @property
    def size(self) -> int:
        """Approximate size in bytes."""

    @property
    def position(self) -> int:
        """How many of these bytes the documents yielded so far account for."""

    @property
    def text_bytes(self) -> int:
        """Estimated bytes of text in the source; errs on the low side."""

    @property
    def language(self) -> str:
        """The language that the source says it is in, a BCP 47 tag; '' if it says none or has not been read yet."""

    def identity(self) -> str:
        """A string that identifies the content."""

    def documents(self, dropped: Counter[str]) -> Iterator[Document]:
        """Yield the documents, always in the same order. Raises `UserError`.

        `dropped` counts what is dropped, by reason ("pages: redirects"), and what is read if its units are not
        documents ("read pages").
        """


class FileSource:
    """A file, compressed if its name ends in one of `PACKED`; subclasses read documents from its `blocks`."""

    #: Part of the identity: the same bytes read as another format are different documents. Empty for plain text.
    kind: ClassVar[str] = ""
    #: Approximate bytes of text per uncompressed byte.
    text_share: ClassVar[float] = 1.0

    __slots__ = ("file", "language", "one_document", "position")

    def __init__(self, file: InputFile, *, one_document: bool = False) -> None:
        self.one_document = one_document
        self.position = 0
        self.language = ""
        self.file = file

    @property
    def path(self) -> Path:
        return Path(self.file.path)

    @property
    def name(self) -> str:
        return self.file.path

    @property
    def size(self) -> int:
        return self.file.bytes

    @property
    def is_packed(self) -> bool:
        return self.name.endswith(PACKED)

    @property
    def text_bytes(self) -> int:
        return self.estimated_text_bytes(self.name, self.size)

    @classmethod
    def estimated_text_bytes(cls, name: str, size: int) -> int:
        """Bytes of text in a file of `size` bytes of this format; `name` tells whether it is compressed."""
        return int(size * cls.text_share * (_PACKED_RATIO if name.endswith(PACKED) else 1))

    def identity(self) -> str:
        return f"{self.kind}:{self.file.sha256}" if self.kind else self.file.sha256

    @classmethod
    def require_packages(cls, name: str) -> None:
        """Raise `UserError` if an optional package needed to read the file `name` of this format is missing."""

    def documents(self, dropped: Counter[str]) -> Iterator[Document]:
        raise NotImplementedError

    def blocks(self, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """Yield the decompressed content in blocks of at most 1 MiB.

        `start`, `stop`: only these bytes, of a file that is not compressed; blocks end at the same offsets as without.
        Raises `UserError` if the file is damaged or truncated, or has changed since it was hashed.
        """
        from common.zstd import zstd

        assert not (self.is_packed and (start or stop is not None))
        self.position = position = start
        unpacked = 0
        with contextlib.ExitStack() as stack:
            raw = stack.enter_context(self.path.open("rb"))
            self.file.require_unchanged(raw.fileno())
            try:
                raw.seek(start)
                file = stack.enter_context(self._unpacked(raw))
                while block := file.read(_BLOCK_BYTES if self.is_packed else _to_read(start + unpacked, stop)):
                    self.file.require_unchanged(raw.fileno())  # this check also covers read-ahead
                    self.position = position  # end of the previous block: none of this one has been used yet
                    position = file.tell_compressed() // 8 if hasattr(file, "tell_compressed") else raw.tell()
                    unpacked += len(block)
                    yield block
                self.file.require_unchanged(raw.fileno())  # a file truncated meanwhile just ends early
            # gzip raises EOFError, BadGzipFile and zlib.error; zstd EOFError; rapidgzip RuntimeError and ValueError.
            except (EOFError, gzip.BadGzipFile, zlib.error, zstd.ZstdError, RuntimeError, ValueError) as error:
                self.file.require_unchanged(raw.fileno())
                raise UserError(
                    f"{self.name} is damaged or cut: it cannot be unpacked beyond {unpacked:,} bytes "
                    f"({' '.join(str(error).split())}); fetch it again and compare its checksum"
                ) from error
        self.position = self.size if stop is None else stop

    def _unpacked(self, raw: Any) -> Any:
        if self.path.name.endswith(".gz"):
            return gzip.GzipFile(fileobj=raw)
        if self.path.name.endswith(".bz2"):
            import rapidgzip

            threads = min(_BZ2_THREADS, available_cores())
            return rapidgzip.RapidgzipFile(raw.fileno(), parallelization=threads, chunk_size=_BZ2_CHUNK_BYTES)
        if self.path.name.endswith(".zst"):
            from common.zstd import zstd

            return zstd.ZstdFile(raw, options={zstd.DecompressionParameter.window_log_max: _ZSTD_WINDOW_LOG_MAX})
        return raw


def _to_read(at: int, stop: int | None) -> int:
    """Bytes from `at` to the end of its block, or to `stop`."""
    size = _BLOCK_BYTES - at % _BLOCK_BYTES
    return size if stop is None else min(size, stop - at)


def cannot_read(source: Source, error: OSError) -> UserError:
    return UserError(f"cannot read {source.name}: {error.strerror}; check the file and its permissions")


def gathered(lines: Iterable[str], dropped: Counter[str], *, one_document: bool) -> Iterator[str]:
    """Group lines into documents, separated by blank lines unless all are `one_document`; drops invisible lines."""
    document: list[str] = []
    characters = 0
    for line in lines:
        if is_visible(line):
            document.append(line)
            characters += len(line)
            if characters < DOCUMENT_CHARACTERS_MAX:
                continue
            dropped["document ends: cut, too long"] += 1
        elif line and not line.isspace():
            dropped[CONTROL_LINES] += 1
            continue
        elif one_document:
            continue
        if document:
            yield "\n".join(document)
        document, characters = [], 0
    if document:
        yield "\n".join(document)


def record_documents(text: str, dropped: Counter[str]) -> list[str]:
    """The text of a record as a document: none if it is empty, several if it is too long."""
    documents = list(gathered(_short_lines(text, dropped), dropped, one_document=True))
    if not documents:
        dropped["documents: no text"] += 1
    return documents


def _short_lines(text: str, dropped: Counter[str]) -> Iterator[str]:
    for line in text.splitlines():
        while len(line) > _RECORD_LINE_CHARACTERS:
            cut = line.rfind(" ", 1, _RECORD_LINE_CHARACTERS) + 1 or _RECORD_LINE_CHARACTERS
            dropped["line ends: cut, too long"] += 1
            yield line[:cut]
            line = line[cut:]
        yield line


def is_visible(text: str) -> bool:
    """Whether `text` has more than white space, control characters, zero-width marks and byte-order marks."""
    return bool(_VISIBLE.search(text))
