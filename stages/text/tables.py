"""Tables: Parquet, and Arrow files and streams. A row is a document, in the column "text"; other columns are not read.

They are what datatrove and Hugging Face's `datasets` write. pyarrow, which reads them, is an optional dependency.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Any, BinaryIO, ClassVar

from common.errors import UserError
from common.hashing import InputFile
from stages.text.base import FileSource, record_documents

COLUMN = "text"
#: Rows converted to Python strings at a time, whatever the batches of the file.
_ROWS = 64
_BUFFER_BYTES = 1 << 20
#: What an Arrow file begins with. A stream follows, then an index, its length, and the first six of these bytes again.
_MAGIC = b"ARROW1\0\0"
_LENGTH_BYTES, _END = 4, _MAGIC[:6]
#: Columns that a message names.
_NAMED = 20


class _TableSource(FileSource):
    """A file of rows; subclasses read their texts as pyarrow's arrays."""

    text_share = 0.9
    title: ClassVar[str]

    def documents(self, dropped: Counter[str]) -> Iterator[str]:
        for text in self._texts():
            if text is None:
                dropped["documents: null"] += 1
            else:
                yield from record_documents(text, dropped)
        self.position = self.size

    def _texts(self) -> Iterator[str | None]:
        pa = self._pyarrow()
        self.position = rows = 0
        with self.path.open("rb") as raw:
            self.file.require_unchanged(raw.fileno())
            try:
                for texts, start, end in self._columns(raw):
                    for first in range(0, len(texts), _ROWS):
                        some = texts.slice(first, _ROWS)
                        some.validate(full=True)  # offsets and UTF-8, which may be wrong in a file
                        found = some.to_pylist()
                        self.file.require_unchanged(raw.fileno())
                        self.position = start + (end - start) * first // len(texts)
                        yield from found
                        rows += len(found)
                        self.file.require_unchanged(raw.fileno())  # mapped memory may no longer be there
            except (pa.ArrowException, ValueError, OSError) as error:
                self.file.require_unchanged(raw.fileno())
                if isinstance(error, OSError) and error.errno is not None:  # of the disk, not of the content
                    raise
                raise UserError(
                    f"{self.name} cannot be read as {self.title} beyond row {rows:,}: {' '.join(str(error).split())}; "
                    f"if it is {self.title}, it is damaged or cut: fetch it again and compare its checksum"
                ) from error

    def _columns(self, raw: BinaryIO) -> Iterator[tuple[Any, int, int]]:
        """Yield arrays of texts, and the bytes of the file where each begins and ends."""
        raise NotImplementedError

    @classmethod
    def require_packages(cls, name: str) -> None:
        try:
            import pyarrow  # noqa: F401
        except ImportError as error:
            raise UserError(
                f"{name} is {cls.title}, which pyarrow reads, and it cannot be imported ({error}); install pyarrow, or "
                f"in a checkout the extra that has it: pip install -e '.[parquet]'"
            ) from None

    def _pyarrow(self) -> Any:
        self.require_packages(self.name)
        import pyarrow

        return pyarrow

    def _index_of_texts(self, schema: Any) -> int:
        """The index of the column of texts. Raises `UserError` if there is none, or it holds something else."""
        types = self._pyarrow().types
        found = schema.get_all_field_indices(COLUMN)
        if len(found) != 1:
            names = ", ".join(schema.names[:_NAMED]) + (", …" if len(schema.names) > _NAMED else "")
            raise UserError(
                f"{self.name} has {len(found) or 'no'} columns called {COLUMN}; it has {' '.join(names.split())}: "
                f"the one that holds the documents must be called {COLUMN}, and no other"
            )
        kind = schema.field(found[0]).type
        values = kind.value_type if types.is_dictionary(kind) else kind
        if not (types.is_string(values) or types.is_large_string(values) or types.is_string_view(values)):
            raise UserError(f"{self.name}: the column {COLUMN} is of type {kind}; it must hold strings: convert it")
        return int(found[0])


class ParquetSource(_TableSource):
    """A Parquet file."""

    kind = "parquet"
    text_share = 1.6  # English Wikipedia of 2022 as Hugging Face has it: 20.3 GB in 11.7 GB
    title = "Parquet"

    def __init__(self, file: InputFile, *, one_document: bool = False) -> None:
        super().__init__(file, one_document=one_document)
        if self.is_packed:
            raise UserError(f"{self.name}: Parquet is compressed inside, and is not read packed; unpack the file")

    def _columns(self, raw: BinaryIO) -> Iterator[tuple[Any, int, int]]:
        from pyarrow.parquet import ParquetFile

        # Without both of the first two options, whole columns of row groups are read, and in advance.
        table = ParquetFile(raw, buffer_size=_BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True)
        self._index_of_texts(table.schema_arrow)
        total, done = table.metadata.num_rows, 0
        for batch in table.iter_batches(_ROWS, columns=[COLUMN], use_threads=False):
            begun, done = done, done + len(batch)
            yield batch.column(0), self.size * begun // total, self.size * done // total
        if done != total:
            raise ValueError(f"it has {done:,} rows, but says that it has {total:,}")


class ArrowSource(_TableSource):
    """An Arrow file (Feather version 2) or stream (as `datasets` writes); either may have any extension of this format.

    One that is not packed is mapped into memory, because its batches may be as large as the file.
    """

    kind = "arrow"
    title = "Arrow"

    def _columns(self, raw: BinaryIO) -> Iterator[tuple[Any, int, int]]:
        from pyarrow import ipc

        schema = ipc.read_schema(self._stream(raw)[0])
        options = ipc.IpcReadOptions(included_fields=[self._index_of_texts(schema)], use_threads=False)
        stream, is_file = self._stream(raw)
        end = 0
        with ipc.open_stream(stream, options=options) as batches:
            last = stream.tell()
            for batch in batches:
                last = stream.tell()
                # `blocks` has set the position of a packed file, unless it had yielded the whole batch before.
                start, end = end, max(end, self.position) if self.is_packed else last
                yield batch.column(0), start, end
        if stream.tell() == last:
            raise ValueError("its end marker is missing")
        _require_end(stream, is_file=is_file)

    def _stream(self, raw: BinaryIO) -> tuple[Any, bool]:
        """The stream from the schema on, for pyarrow to read, and whether it is an Arrow file."""
        pa = self._pyarrow()
        if self.is_packed:
            blocks = self.blocks()
            first = next(blocks, b"")
            is_file = first.startswith(_MAGIC)
            return pa.PythonFile(_Blocks(chain([first[len(_MAGIC) * is_file :]], blocks)), mode="r"), is_file
        stream = pa.BufferReader(pa.py_buffer(mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ)))
        is_file = stream.read(len(_MAGIC)) == _MAGIC
        stream.seek(len(_MAGIC) * is_file)
        return stream, is_file


def _require_end(stream: Any, *, is_file: bool) -> None:
    """Raise `ValueError` unless the rows are followed by an index alone or, in a stream, by nothing."""
    count, tail = 0, b""
    while block := stream.read(_BUFFER_BYTES):
        count += len(block)
        tail = (tail + block)[-_LENGTH_BYTES - len(_END) :]
    length = int.from_bytes(tail[:_LENGTH_BYTES], "little")
    if is_file and (not tail.endswith(_END) or count != length + len(tail)):
        raise ValueError("its index is missing or damaged, or more data follows it")
    if count and not is_file:
        raise ValueError("more data follows its end")


class _Blocks:
    """Blocks of bytes as a file to read from."""

    closed = False

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._rest = b""
        self._given = 0

    def read(self, count: int) -> bytes:
        """`count` bytes, fewer only at the end."""
        pieces, there = [self._rest], len(self._rest)
        while there < count and (block := next(self._blocks, b"")):
            pieces.append(block)
            there += len(block)
        together = b"".join(pieces)
        found, self._rest = together[:count], together[count:]
        self._given += len(found)
        return found

    def tell(self) -> int:
        return self._given

    def flush(self) -> None:
        """Do nothing; pyarrow calls it."""

    def close(self) -> None:
        """Do nothing: `FileSource.blocks` closes its file."""
