"""Files read by the workers: byte offsets of documents are handed out instead of their text.

A worker finds the documents of a chunk of a file, one process joins those that continue in the next chunk, and whoever
needs a document's text reads it from the file. The documents are those of `FileSource.documents`, whatever the chunk
size: a chunk has the lines that begin in it, and documents end at lines that every reader can find on its own. Those
that may have to be cut, which depends on everything before them, are read by one process.
"""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from stages.text.base import (
    CONTROL_LINES,
    DOCUMENT_CHARACTERS_MAX,
    Document,
    FileSource,
    Source,
    cannot_read,
    text_of,
)

if TYPE_CHECKING:  # it imports what the pipeline, which needs only the options, can do without
    from common.workers import Workers

#: Bytes of a chunk, and of the small files that are given to a worker together; and the most files given together.
_CHUNK_BYTES, _FILES_MAX = 4 << 20, 256
#: Bytes read at a time to find the end of a line.
_LOOK_BYTES = 1 << 16


class Extent(NamedTuple):
    """A document in a file, or the part of it in a chunk."""

    start: int
    end: int
    #: Characters of its text and a final line end; at least `DOCUMENT_CHARACTERS_MAX` if it may have to be cut.
    characters: int
    #: Lines dropped as `CONTROL_LINES`.
    control_lines: int


@dataclass(slots=True)
class Chunk:
    """The documents that a chunk's lines hold."""

    #: `Extent`s, one after another.
    extents: array[int] = field(default_factory=lambda: array("q"))
    #: Whether a document ends in the chunk, at a line that separates it from the next.
    is_separated: bool = False
    #: Whether the first extent continues from the previous chunk, and the last one into the next.
    has_head: bool = False
    has_tail: bool = False
    dropped: Counter[str] = field(default_factory=Counter)

    def add(self, *extent: int) -> None:
        self.extents.extend(extent)

    def __iter__(self) -> Iterator[Extent]:
        values = iter(self.extents)
        return map(Extent._make, zip(values, values, values, values, strict=True))


class SplittableSource(FileSource):
    """A file that can be read from any of its lines on, unless it is compressed."""

    def chunk(self, start: int, stop: int) -> Chunk:
        """The documents in the lines that begin in bytes `start` to `stop`. Raises `UserError`, `OSError`."""
        raise NotImplementedError

    def between(self, start: int, stop: int, dropped: Counter[str]) -> Iterator[str]:
        """The documents in bytes `start` to `stop`, which hold whole documents. Raises `UserError`, `OSError`."""
        raise NotImplementedError

    def text(self, data: bytes, start: int) -> str:
        """The text of the one document in `data`, found at byte `start`."""
        raise NotImplementedError

    def first_line(self, file: BinaryIO, start: int, stop: int) -> int:
        """Offset of the first line that begins in bytes `start` to `stop`; at least `stop` if none does."""
        if start == 0:
            return 0
        file.seek(start - 1)
        at = start - 1
        while at < stop and (block := file.read(min(_LOOK_BYTES, stop - at))):
            end = block.find(b"\n")
            if end >= 0:
                return at + end + 1
            at += len(block)
        return stop

    def texts(self, spans: Iterable[TextSpan]) -> Iterator[str]:
        """The texts of documents of this file. Raises `UserError`."""
        try:
            with self.path.open("rb") as file:
                for span in spans:
                    file.seek(span.start)
                    data = file.read(span.end - span.start)
                    self.file.require_unchanged(file.fileno())
                    yield self.text(data, span.start)
        except OSError as error:
            raise cannot_read(self, error) from error


@dataclass(frozen=True, slots=True)
class TextSpan:
    """A document as a place in a file; see `stages.text.base.Markup`."""

    source: SplittableSource
    start: int
    end: int
    characters: int

    def __len__(self) -> int:
        return self.characters

    def text(self, dropped: Counter[str]) -> str:
        """What is dropped was counted when the document was found."""
        return next(self.source.texts([self]))


def texts_of(documents: Iterable[Document], dropped: Counter[str]) -> Iterator[str]:
    """The text of each document; each file is opened once for adjacent documents. Raises `UserError`."""

    def source(document: Document) -> SplittableSource | None:
        return document.source if isinstance(document, TextSpan) else None

    for file, group in itertools.groupby(documents, source):
        if file is None:
            yield from (text_of(document, dropped) for document in group)
        else:
            yield from file.texts(span for span in group if isinstance(span, TextSpan))


#: Reads the documents of one of several sources, which must be requested in order.
Reader = Callable[[Source, "Counter[str]"], Iterator[Document]]


def reader(sources: Sequence[Source], workers: Workers | None) -> Reader:
    """The reader of `sources`; with several `workers`, they find the documents, which are then `TextSpan`s."""
    if workers is None or not workers.are_several:
        return lambda source, dropped: source.documents(dropped)
    chunks = itertools.chain.from_iterable(workers.map(_find, _grouped(_ranges(sources))))

    def read(source: Source, dropped: Counter[str]) -> Iterator[Document]:
        if isinstance(source, SplittableSource) and not source.is_packed:
            return _joined(source, chunks, dropped)
        return source.documents(dropped)

    return read


_Range = tuple[SplittableSource, int, int]


def _ranges(sources: Iterable[Source]) -> Iterator[_Range]:
    for source in sources:
        if isinstance(source, SplittableSource) and not source.is_packed:
            for start, stop in _bounds(source):
                yield source, start, stop


def _bounds(source: SplittableSource) -> Iterator[tuple[int, int]]:
    """Where the chunks of a file begin and end; an empty file has one, as it may have changed."""
    for start in range(0, max(source.size, 1), _CHUNK_BYTES):
        yield start, min(start + _CHUNK_BYTES, source.size)


def _grouped(ranges: Iterable[_Range]) -> Iterator[list[_Range]]:
    group: list[_Range] = []
    size = 0
    for one in ranges:
        group.append(one)
        size += one[2] - one[1]
        if size >= _CHUNK_BYTES or len(group) == _FILES_MAX:
            yield group
            group, size = [], 0
    if group:
        yield group


def _find(ranges: list[_Range]) -> list[Chunk]:
    found = []
    for source, start, stop in ranges:
        try:
            found.append(source.chunk(start, stop))
        except OSError as error:
            raise cannot_read(source, error) from error
    return found


def _joined(source: SplittableSource, chunks: Iterator[Chunk], dropped: Counter[str]) -> Iterator[Document]:
    """The documents of a file from its chunks, which are the next of `chunks`."""
    source.position = 0
    held: Extent | None = None  # what may continue in the next chunk
    for _, stop in _bounds(source):
        chunk = next(chunks)
        dropped.update(chunk.dropped)
        extents = list(chunk)
        if chunk.has_head:
            held = _both(held, extents.pop(0))
        if chunk.is_separated:
            tail = extents.pop() if chunk.has_tail else None
            for extent in [held, *extents]:
                yield from _documents(source, extent, dropped)
            held = tail
        source.position = stop
    yield from _documents(source, held, dropped)
    source.position = source.size


def _both(a: Extent | None, b: Extent) -> Extent:
    if a is None:
        return b
    return Extent(a.start, b.end, a.characters + b.characters, a.control_lines + b.control_lines)


def _documents(source: SplittableSource, extent: Extent | None, dropped: Counter[str]) -> Iterator[Document]:
    if extent is None:
        return
    if extent.characters >= DOCUMENT_CHARACTERS_MAX:
        yield from source.between(extent.start, extent.end, dropped)
        return
    if extent.control_lines:
        dropped[CONTROL_LINES] += extent.control_lines
    if extent.characters:
        yield TextSpan(source, extent.start, extent.end, extent.characters - 1)
