"""Human-readable numbers, times and sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime


def number(value: float | None) -> str:
    """Format with four significant digits, without decimals from 1000 on: 6.512, 28,125, 0.0004, 2.8e-05."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def percent(share: float) -> str:
    return f"{share:.1%}"


def duration(seconds: float) -> str:
    """Format a duration: `0.3 s`, `12 s`, `4 min 05 s`, `45 h 02 min`, `3 d 4 h`."""
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if not hours:
        return f"{minutes} min {rest:02} s"
    days, hours_left = divmod(hours, 24)
    return f"{days} d {hours_left} h" if days >= 3 else f"{hours} h {minutes:02} min"


def moment(time: float, *, seconds: bool = False) -> str:
    """Format a Unix time in the local time zone, with the zone's name."""
    return datetime.fromtimestamp(time).astimezone().strftime(f"%Y-%m-%d %H:%M{':%S' if seconds else ''} %Z")


def size(count: float) -> str:
    """Format a number of bytes: `0 B`, `12.3 kB`, `4.0 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """One line per row, with its cells aligned below those of the first row, the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
