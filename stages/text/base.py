"""What a source of documents is, and what all that are files have in common: they may be packed, damaged, cut."""

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
from common.workers import processes_asked_for

_BLOCK_BYTES = 1 << 20
#: Threads that unpack a .bz2 file (six keep up with the XML parser), and what each takes at a time: the library's own
#: choice, 4 MiB, took three times the memory and was a fifth faster.
_BZ2_THREADS, _BZ2_CHUNK_BYTES = 6, 1 << 20
#: A document longer than this many characters is cut at a line end, so that memory is bounded by it.
DOCUMENT_CHARACTERS_MAX = 4 << 20
#: Bytes that a packed file unpacks to, for each of its own: not quite as many as most do.
_PACKED_RATIO = 3
_VISIBLE = re.compile(r"[^\s\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028\u2029\u2060\ufeff]")


class Markup(Protocol):
    """A document that is not text yet: making text of it costs so much that it is left to whoever needs it."""

    def __len__(self) -> int:
        """Characters, with the markup."""

    def text(self, dropped: Counter[str]) -> str:
        """Its text, one paragraph or sentence a line, or ''; counts what it drops, by reason."""


#: What sources give: text, one paragraph or sentence a line, or what text can be made of in any process.
Document = str | Markup


def text_of(document: Document, dropped: Counter[str]) -> str:
    return document if isinstance(document, str) else document.text(dropped)


class Source(Protocol):
    """One place that documents come from."""

    @property
    def name(self) -> str:
        """How messages call it."""

    @property
    def size(self) -> int:
        """Its size, about, in bytes."""

    @property
    def position(self) -> int:
        """How many of these bytes the documents given so far come from."""

    @property
    def text_bytes(self) -> int:
        """How many bytes of text are in it, about; rather too few than too many."""

    def identity(self) -> str:
        """What tells its content from any other."""

    def documents(self, dropped: Counter[str]) -> Iterator[Document]:
        """Documents, always in the same order. Raises `UserError`.

        Counts what it drops, by reason ("pages: redirects"), and what it reads if not documents ("read pages").
        """


class FileSource:
    """A file, packed if its name ends in .gz or .bz2; subclasses read documents from its `blocks`."""

    #: Stands in its identity: the same bytes read in another way are other documents. Plain text has none.
    kind: ClassVar[str] = ""
    #: Bytes of text in a byte of such a file, about.
    text_share: ClassVar[float] = 1.0

    __slots__ = ("_file", "one_document", "position")

    def __init__(self, file: InputFile, *, one_document: bool = False) -> None:
        self.one_document = one_document
        self.position = 0
        self._file = file

    @property
    def path(self) -> Path:
        return Path(self._file.path)

    @property
    def name(self) -> str:
        return self._file.path

    @property
    def size(self) -> int:
        return self._file.bytes

    @property
    def text_bytes(self) -> int:
        packed = self.name.endswith((".gz", ".bz2"))
        return int(self.size * self.text_share * (_PACKED_RATIO if packed else 1))

    def identity(self) -> str:
        return f"{self.kind}:{self._file.sha256}" if self.kind else self._file.sha256

    def documents(self, dropped: Counter[str]) -> Iterator[Document]:
        raise NotImplementedError

    def blocks(self) -> Iterator[bytes]:
        """The content, unpacked, in pieces of about a megabyte.

        Raises `UserError` where it is damaged or cut, and when the file is no longer the one that was hashed.
        """
        self.position = position = unpacked = 0
        with contextlib.ExitStack() as stack:
            raw = stack.enter_context(self.path.open("rb"))
            self._file.require_unchanged(raw.fileno())
            try:
                file = stack.enter_context(self._unpacked(raw))
                while block := file.read(_BLOCK_BYTES):
                    self._file.require_unchanged(raw.fileno())  # all bytes read so far, ahead or not, are older
                    self.position = position  # of the block before: of this one nothing has been used yet
                    position = file.tell_compressed() // 8 if hasattr(file, "tell_compressed") else raw.tell()
                    unpacked += len(block)
                    yield block
                self._file.require_unchanged(raw.fileno())  # a file that was cut ends early
            # EOFError, BadGzipFile, zlib.error: gzip's; RuntimeError, ValueError: rapidgzip's.
            except (EOFError, gzip.BadGzipFile, zlib.error, RuntimeError, ValueError) as error:
                self._file.require_unchanged(raw.fileno())
                raise UserError(
                    f"{self.name} is damaged or cut: it cannot be unpacked beyond {unpacked:,} bytes "
                    f"({' '.join(str(error).split())}); fetch it again and compare its checksum"
                ) from error
        self.position = self.size

    def _unpacked(self, raw: Any) -> Any:
        if self.path.name.endswith(".gz"):
            return gzip.GzipFile(fileobj=raw)
        if self.path.name.endswith(".bz2"):
            import rapidgzip

            threads = min(_BZ2_THREADS, processes_asked_for(0))
            return rapidgzip.RapidgzipFile(raw.fileno(), parallelization=threads, chunk_size=_BZ2_CHUNK_BYTES)
        return raw


def cannot_read(source: Source, error: OSError) -> UserError:
    return UserError(f"cannot read {source.name}: {error.strerror}; check the file and its permissions")


def gathered(lines: Iterable[str], dropped: Counter[str], *, one_document: bool) -> Iterator[str]:
    """Documents of lines: a blank line ends one, unless all are `one_document`; nothing invisible is in them."""
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
            dropped["lines: control characters only"] += 1
            continue
        elif one_document:
            continue
        if document:
            yield "\n".join(document)
        document, characters = [], 0
    if document:
        yield "\n".join(document)


def is_visible(text: str) -> bool:
    """Whether there is something to see: not white space, control characters, zero-width marks, a byte-order mark."""
    return bool(_VISIBLE.search(text))
