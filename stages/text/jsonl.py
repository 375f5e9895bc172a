"""JSON Lines: one object per line, whose "text" is a document."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator

from common.errors import UserError
from stages.text.base import DOCUMENT_CHARACTERS_MAX, record_documents
from stages.text.plain import decode
from stages.text.spans import Chunk, SplittableSource

#: Lines are read whole; a longer one is refused.
_LINE_BYTES_MAX = 16 << 20
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")


class JsonLinesSource(SplittableSource):
    """A UTF-8 file of JSON objects, one per line, each with a string "text"; other keys are ignored."""

    kind = "jsonl"
    text_share = 0.9

    def documents(self, dropped: Counter[str]) -> Iterator[str]:
        yield from self.between(0, None, dropped)

    def between(self, start: int, stop: int | None, dropped: Counter[str]) -> Iterator[str]:
        for offset, line in self._lines(start, stop):
            if line.strip():
                yield from self._documents(offset, line, dropped)

    def chunk(self, start: int, stop: int) -> Chunk:
        with self.path.open("rb") as file:
            begin = self.first_line(file, start, stop)
            self.file.require_unchanged(file.fileno())
        chunk = Chunk(is_separated=True)
        for offset, line in self._lines(begin, None) if begin < stop else ():
            if offset >= stop:
                break
            if not line.strip():
                continue
            dropped: Counter[str] = Counter()
            documents = self._documents(offset, line, dropped)
            characters = sum(len(document) + 1 for document in documents)
            if characters:
                chunk.add(offset, offset + len(line), characters, 0)
            if characters < DOCUMENT_CHARACTERS_MAX:  # else it is read again, and counted then
                chunk.dropped.update(dropped)
        return chunk

    def text(self, data: bytes, start: int) -> str:
        return self._documents(start, data, Counter())[0]

    def _documents(self, offset: int, line: bytes, dropped: Counter[str]) -> list[str]:
        """The documents in the line at byte `offset`. Raises `UserError`."""
        text = self._text(offset, decode(self.name, line, offset))
        if _HALF_CHARACTER.search(text):  # JSON escapes can spell a lone surrogate, which UTF-8 cannot encode
            text, halves = _HALF_CHARACTER.subn("\ufffd", text)
            dropped["characters: half of one"] += halves
        return record_documents(text, dropped)

    def _text(self, offset: int, line: str) -> str:
        try:
            record = json.loads(line)
            reason = (
                "" if isinstance(record, dict) and isinstance(record.get("text"), str) else 'no string "text" in it'
            )
        except (ValueError, RecursionError) as error:
            reason = f"it is not JSON: {error}"
        if reason:
            raise UserError(
                f"{self.name}, line {self._line_number(offset)}: {reason}; each line must be an object such as "
                f'{{"text": "A document."}}, and line ends inside the text must be written \\n'
            )
        text: str = record["text"]
        return text

    def _line_number(self, offset: int) -> int:
        """The number of the line at byte `offset`, from 1; reads all before it."""
        return next(number for number, (at, _) in enumerate(self._lines(), 1) if at >= offset)

    def _lines(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, bytes]]:
        """Yield (byte offset, line)."""
        offset, pieces = start, [b""]
        for block in self.blocks(start, stop):
            first, *others = block.split(b"\n")
            pieces.append(first)
            for other in others:
                line = b"".join(pieces)
                yield offset, line
                offset, pieces = offset + len(line) + 1, [other]
            if sum(map(len, pieces)) > _LINE_BYTES_MAX:
                raise UserError(
                    f"{self.name} has a line of more than {_LINE_BYTES_MAX >> 20} MiB at byte {offset}; "
                    f"write one document per line, and split those this long"
                )
        yield offset, b"".join(pieces)
