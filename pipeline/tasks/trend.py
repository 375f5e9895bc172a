"""The trend over all complete nights, in the terminal and as the page WORK/nights/trend.html."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.tasks import night_records

if TYPE_CHECKING:
    from stages.view.trend import Night

PAGE = "trend.html"


def text(nights: Path) -> str:
    from stages.view import trend

    return trend.text(_nights(nights))


def write(nights: Path) -> Path:
    """Write the page; returns its path. Raises `DiskError`."""
    from stages.view import trend

    trend.write(nights / PAGE, _nights(nights), time.time())
    return nights / PAGE


def _nights(nights: Path) -> list[Night]:
    from stages.view.trend import Night

    return [
        Night.of(date, record, "" if night_records.is_accepted(record) else night_records.rejection(record["gate"]))
        for date, record in night_records.records(nights).items()
    ]
