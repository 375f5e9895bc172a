"""The Markdown that cards use."""

from __future__ import annotations

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in which all columns but the first are right-aligned; '' without rows."""
    if not rows:
        return ""
    lines = [head, ["---"] + ["---:" if len(head) > 1 else "---"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(_cell(text) for text in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
