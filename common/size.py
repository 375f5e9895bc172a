"""Sizes as people write them."""

from __future__ import annotations

import re

ALLOWED = "a size such as 500M, 2GB or 1.5TiB"
_FORM = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i)?)?B?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes: K, M, G and T are powers of 1000, or of 1024 with an i. Raises ValueError for other forms, and for 0."""
    found = _FORM.fullmatch(text.strip())
    power = " KMGT".index(found[2].upper()) if found is not None and found[2] else 0
    size = int(float(found[1]) * (1024 if found[3] else 1000) ** power) if found is not None else 0
    if not size:
        raise ValueError(f"{text} is not {ALLOWED}")
    return size
