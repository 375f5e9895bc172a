"""Progress of transfers to and from a store."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from tqdm import tqdm


def transfer_bar(what: str, total_bytes: int | None = None, *, hidden: bool = False) -> tqdm[NoReturn]:
    """A bar on stderr; a context manager."""
    from tqdm import tqdm

    return tqdm(desc=what, total=total_bytes, unit=" B", unit_scale=True, ncols=100, disable=hidden)
