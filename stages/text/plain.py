"""Plain text: one paragraph or sentence per line, with documents separated by blank lines or one per file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from common.errors import UserError
from stages.text.base import DOCUMENT_CHARACTERS_MAX, gathered, is_visible
from stages.text.spans import Chunk, SplittableSource

#: At least the size of a block, so that a line is not cut at the end of the block in which it begins: whether it is cut
#: must not depend on where reading began.
_LINE_BYTES = 1 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
#: The end of a line, if the next has only characters that may be invisible: `is_visible` decides. Bytes are searched
#: because that is four times as fast as decoding and looking at each line.
_MAY_BE_BLANK = re.compile(
    rb"\n(?=((?:[\x00-\x09\x0b-\x20\x7f]|\xc2[\x80-\xa0]|\xe1\x9a\x80|\xe2[\x80\x81][\x80-\xbf]|\xe3\x80\x80|\xef\xbb\xbf)*)\n)"
)


class PlainTextSource(SplittableSource):
    """A UTF-8 text file."""

    __slots__ = ()

    def documents(self, dropped: Counter[str]) -> Iterator[str]:
        yield from self.between(0, None, dropped)

    def between(self, start: int, stop: int | None, dropped: Counter[str]) -> Iterator[str]:
        yield from gathered(self._lines(start, stop, dropped), dropped, one_document=self.one_document)

    def _lines(self, start: int, stop: int | None, dropped: Counter[str]) -> Iterator[str]:
        """Yield lines without line ends; lines over 1 MiB are split.

        Raises `UserError` with the byte offset of invalid UTF-8.
        """
        offset, rest = start, b""
        for block in self.blocks(start, stop):
            rest += block
            cut = rest.rfind(b"\n") + 1
            if not cut and len(rest) > _LINE_BYTES:
                cut = _end_of_piece(rest)
                dropped["line ends: cut, too long"] += 1
            if cut:
                yield from decode(self.name, rest[:cut], offset).removesuffix("\n").split("\n")
                offset, rest = offset + cut, rest[cut:]
        if rest:
            yield from decode(self.name, rest, offset).split("\n")

    def chunk(self, start: int, stop: int) -> Chunk:
        begin, data, end = self._whole_lines(start, stop)
        chunk = Chunk()
        at = invisible = control = 0  # of the current document: where it begins; characters and lines that show nothing
        # Each line follows a line end, and the last one has one, so that a line is found where it begins in `data`.
        lines = b"\n%b\n" % data.removesuffix(b"\n") if data else b""
        for match in _MAY_BE_BLANK.finditer(lines):
            line, place = match[1].decode(), match.start()
            if len(match[1]) > _LINE_BYTES or is_visible(line):
                continue
            is_control = bool(line) and not line.isspace()
            if is_control or self.one_document:
                invisible += len(line) + 1
                control += is_control
                continue
            is_found = self._add(chunk, begin + at, begin + place, data[at:place], invisible, control)
            chunk.has_head |= is_found and not chunk.is_separated
            chunk.is_separated = True
            at, invisible, control = place + len(match[1]) + 1, 0, 0
        chunk.has_tail = self._add(chunk, begin + at, end, data[at:], invisible, control)
        chunk.has_head |= chunk.has_tail and not chunk.is_separated
        return chunk

    def _add(self, chunk: Chunk, start: int, end: int, data: bytes, invisible: int, control: int) -> bool:
        """Add the document, or the part of one, in `data` if it holds anything; returns whether it does."""
        if len(data) > _LINE_BYTES and max(map(len, data.split(b"\n"))) > _LINE_BYTES:
            characters = DOCUMENT_CHARACTERS_MAX  # a line that may be cut, which depends on where blocks end
        else:
            text = decode(self.name, data, start)
            characters = len(text) + (not text.endswith("\n")) - invisible if data else 0
        if characters or control:
            chunk.add(start, end, characters, control)
        return bool(characters or control)

    def _whole_lines(self, start: int, stop: int) -> tuple[int, bytes, int]:
        """The lines that begin in bytes `start` to `stop`: where the first begins, their bytes, and where the last
        ends. If the last one is too long, it is cut, but still longer than `_LINE_BYTES`."""
        with self.path.open("rb") as file:
            begin = min(self.first_line(file, start, stop), stop)
            file.seek(begin)
            data = file.read(stop - begin)
            end = begin + len(data)
            while data and not data.endswith(b"\n") and (more := file.readline(_LINE_BYTES)):
                end += len(more)
                if len(data) < stop - begin + 2 * _LINE_BYTES:
                    data += more
                if more.endswith(b"\n"):
                    break
            self.file.require_unchanged(file.fileno())
        if begin == 0 and data.startswith(_BYTE_ORDER_MARK):
            begin, data = len(_BYTE_ORDER_MARK), data[len(_BYTE_ORDER_MARK) :]
        return begin, data, end

    def text(self, data: bytes, start: int) -> str:
        return "\n".join(filter(is_visible, decode(self.name, data, start).split("\n")))


def _end_of_piece(data: bytes) -> int:
    """Where to cut a long line: after its last space, else before its last character (never inside a character)."""
    space = data.rfind(b" ") + 1
    if space:
        return space
    end = len(data) - 1
    while end > len(data) - 4 and data[end] & 0xC0 == 0x80:
        end -= 1
    return end


def decode(name: str, data: bytes, offset: int) -> str:
    """Decode UTF-8 `data`, found at byte `offset` of the file `name`; raises `UserError`."""
    try:
        # The byte-order mark that Windows programs write first is not text.
        return data.decode("utf-8").removeprefix("\ufeff") if offset == 0 else data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{name} is not UTF-8: byte 0x{data[error.start]:02x} at offset {offset + error.start}; "
            f"convert it, for example with iconv -t UTF-8"
        ) from None
