"""Plain text: one paragraph or sentence per line, with documents separated by blank lines or one per file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from common.errors import UserError
from stages.text.base import FileSource, gathered

_LINE_BYTES = 1 << 20


class PlainTextSource(FileSource):
    """A UTF-8 text file."""

    __slots__ = ()

    def documents(self, dropped: Counter[str]) -> Iterator[str]:
        yield from gathered(self._lines(dropped), dropped, one_document=self.one_document)

    def _lines(self, dropped: Counter[str]) -> Iterator[str]:
        """Yield lines without line ends; lines over 1 MiB are split.

        Raises `UserError` with the byte offset of invalid UTF-8.
        """
        offset, rest = 0, b""
        for block in self.blocks():
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
