"""Sizes as people write them."""

from __future__ import annotations

import pytest

from common.size import parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1), ("1000000", 10**6), ("2k", 2000), ("500MB", 5 * 10**8), ("2G", 2 * 10**9), ("2 GB", 2 * 10**9),
        ("2GiB", 2 << 30), ("1.5TiB", 3 << 39), ("0.5kib", 512), ("10B", 10),
    ],
)  # fmt: skip
def test_what_people_write(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "0.1", "-1G", "many", "1X", "1GiBB", "1iB", "1e9", "1,000"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size such as 500M, 2GB or 1.5TiB"):
        parse_size(text)
