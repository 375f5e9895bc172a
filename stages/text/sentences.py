"""Text → sentences."""

from __future__ import annotations

from collections.abc import Iterator

#: Longer lines are split into sentences one window of this length at a time.
_WINDOW_CHARACTERS = 8192


def sentences(document: str) -> list[str]:
    """Split a text into stripped sentences, in order; no sentence spans a line break."""
    found: list[list[str]] = []  # the pieces of each sentence
    for line in document.split("\n"):
        inside = False
        for sentence in _segments(line):
            if inside:
                found[-1].append(sentence)
            else:
                found.append([sentence])
            # sentencex ends a sentence inside "tkinter.Tk()"; in scripts with spaces, a space must follow the end.
            inside = sentence[-1].isascii() and not sentence[-1].isspace()
    return [stripped for pieces in found if (stripped := "".join(pieces).strip())]


def _segments(line: str) -> Iterator[str]:
    """Segment a line with sentencex.

    sentencex takes quadratic time: seconds for a line of 80,000 Chinese characters. So a long line is processed in
    windows; each starts at the last sentence of the previous window, which may have been cut.
    """
    from sentencex import segment

    start = 0
    while len(line) - start > _WINDOW_CHARACTERS:
        *whole, last = segment("en", line[start : start + _WINDOW_CHARACTERS])
        if not whole:  # not a real sentence: cut after a space, or anywhere
            last = last[: last.rfind(" ") + 1] or last
            whole = [last]
        yield from whole
        start += sum(map(len, whole))
    yield from segment("en", line[start:])
