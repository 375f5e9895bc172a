"""Markdown, as far as cards have it."""

from __future__ import annotations

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns are aligned right but for the first; '' without rows."""
    if not rows:
        return ""
    lines = [head, ["---"] + ["---:" if len(head) > 1 else "---"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(_cell(text) for text in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
