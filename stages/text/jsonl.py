"""JSON Lines: one object per line, whose "text" is a document."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator

from common.errors import UserError
from stages.text.base import FileSource, record_documents
from stages.text.plain import decode

#: Lines are read whole; a longer one is refused.
_LINE_BYTES_MAX = 16 << 20
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")


class JsonLinesSource(FileSource):
    """A UTF-8 file of JSON objects, one per line, each with a string "text"; other keys are ignored."""

    kind = "jsonl"
    text_share = 0.9

    def documents(self, dropped: Counter[str]) -> Iterator[str]:
        for number, (offset, line) in enumerate(self._lines(), 1):
            if not line.strip():
                continue
            text = self._text(number, decode(self.name, line, offset))
            if _HALF_CHARACTER.search(text):  # JSON escapes can spell a lone surrogate, which UTF-8 cannot encode
                text, halves = _HALF_CHARACTER.subn("\ufffd", text)
                dropped["characters: half of one"] += halves
            yield from record_documents(text, dropped)

    def _text(self, number: int, line: str) -> str:
        try:
            record = json.loads(line)
            reason = (
                "" if isinstance(record, dict) and isinstance(record.get("text"), str) else 'no string "text" in it'
            )
        except (ValueError, RecursionError) as error:
            reason = f"it is not JSON: {error}"
        if reason:
            raise UserError(
                f"{self.name}, line {number}: {reason}; each line must be an object such as "
                f'{{"text": "A document."}}, and line ends inside of the text must be written \\n'
            )
        text: str = record["text"]
        return text

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield (byte offset, line)."""
        offset, pieces = 0, [b""]
        for block in self.blocks():
            first, *others = block.split(b"\n")
            pieces.append(first)
            for other in others:
                line = b"".join(pieces)
                yield offset, line
                offset, pieces = offset + len(line) + 1, [other]
            if sum(map(len, pieces)) > _LINE_BYTES_MAX:
                raise UserError(
                    f"{self.name} has a line of more than {_LINE_BYTES_MAX >> 20} MiB at byte {offset}; "
                    f"write one document a line, and split those that are as long as that"
                )
        yield offset, b"".join(pieces)
