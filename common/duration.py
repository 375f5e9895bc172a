"""A length of time as a person writes it: 90s, 20m, 8h, 1d."""

from __future__ import annotations

import re
from typing import Self

#: Seconds in each unit, largest first.
_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_FORM = re.compile("([1-9][0-9]{0,8})([dhms])")


class Duration(int):
    """Whole seconds; as text, a number of the largest unit that divides them, so that 1200s and 20m are the same."""

    ALLOWED = "a time such as 90s, 20m, 8h or 1d"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError if `text` has any other form."""
        found = _FORM.fullmatch(text)
        if found is None:
            raise ValueError(f"{text} is not {cls.ALLOWED}")
        return cls(int(found[1]) * _UNITS[found[2]])

    def __str__(self) -> str:
        unit = next(unit for unit, seconds in _UNITS.items() if not self % seconds)
        return f"{int(self) // _UNITS[unit]}{unit}"
