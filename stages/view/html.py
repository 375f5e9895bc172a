"""Pieces of HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Iterable[int] = (),
    caption: str = "",
    paths: Iterable[int] = (),
) -> str:
    """A table of plain texts whose first column names the row; `numbers`, `paths`: the columns that hold such."""
    right, long = set(numbers), set(paths)

    def kind(column: int) -> str:
        return ' class="n"' if column in right else ' class="path"' if column in long else ""

    heads = "".join(f'<th scope="col"{kind(at)}>{escape(text)}</th>' for at, text in enumerate(head))
    body = []
    for row in rows:
        first, *rest = row
        cells = "".join(f"<td{kind(at)}>{escape(text)}</td>" for at, text in enumerate(rest, start=1))
        body.append(f'<tr><th scope="row"{kind(0)}>{escape(first)}</th>{cells}</tr>')
    said = f"<caption>{escape(caption)}</caption>" if caption else ""
    heads = f"<thead><tr>{heads}</tr></thead>" if any(head) else ""
    return f'<div class="table"><table>{said}{heads}<tbody>{"".join(body)}</tbody></table></div>'


def details(summary: str, body: str) -> str:
    """`body`, folded away."""
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"


def cards(found: Iterable[tuple[str, str, str]]) -> str:
    """Figures at a glance: (name, value, what else there is to say)."""
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}{f'<small>{escape(more)}</small>' if more else ''}</dd></div>"
        for name, value, more in found
    )
    return f'<dl class="cards">{items}</dl>' if items else ""
