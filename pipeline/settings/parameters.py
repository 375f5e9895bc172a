"""The types of values in luigi.cfg, as luigi parameters whose errors name the value and what is allowed.

Luigi's own say what is allowed only of a number out of range and, in random order, of a choice; not of "1.5" for an
integer or "perhaps" for a boolean; and OptionalIntParameter accepts -3.
"""

from __future__ import annotations

import configparser
import re
from collections.abc import Collection
from typing import Any, TypeVar
from urllib.parse import urlsplit

import luigi

from common.errors import UserError
from common.options import fields_of, kind_of
from common.secrets import Secret

T = TypeVar("T")


class Setting(luigi.Parameter[T]):
    """A luigi parameter with an error of one line."""

    def refuse(self, value: object, allowed: str) -> UserError:
        return UserError(f"{self._attribute_name} = {value} is not allowed; allowed: {allowed}")


class Choice(Setting[str]):
    """One of `choices`."""

    def __init__(self, choices: Collection[str]) -> None:
        super().__init__()
        self._choices = choices

    def parse(self, x: str) -> str:
        if x not in self._choices:
            raise self.refuse(x, ", ".join(self._choices))
        return x


class Address(Setting[Secret]):
    """An address or a path; credentials in it are never shown."""

    def parse(self, x: str) -> Secret:
        return Secret.address(x)


class Hidden(Setting[Secret]):
    """A text that is never shown."""

    def parse(self, x: str) -> Secret:
        return Secret(x)


class Webhook(Hidden):
    """An address for POST requests, never shown; or empty."""

    def parse(self, x: str) -> Secret:
        try:
            parts = urlsplit(x)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            usable = False
        if x and (not usable or re.search(r"\s", x)):
            raise UserError(f"{self._attribute_name} is no address; allowed: empty, or http:// or https:// with a host")
        return Secret(x)


class Sha256OrEmpty(Setting[str]):
    """A sha256 in hex, or empty."""

    def parse(self, x: str) -> str:
        if x.strip() and not re.fullmatch("[0-9a-fA-F]{64}", x.strip()):
            raise self.refuse(x, "empty or 64 hexadecimal digits")
        return x.strip().lower()


class Switch(Setting[bool]):
    """true or false."""

    def parse(self, x: str) -> bool:
        states = configparser.ConfigParser.BOOLEAN_STATES
        if x.lower() not in states:
            raise self.refuse(x, "true, false")
        return states[x.lower()]


class Number(Setting[float]):
    """A number from `least` to `most`."""

    def __init__(self, least: float, most: float | None = None) -> None:
        super().__init__()
        self._range = (least, most)

    def parse(self, x: str) -> float:
        return float(_number(self, x, float, "a number", self._range))


class Whole(Setting[int]):
    """A whole number from `least` to `most`."""

    def __init__(self, least: int, most: int | None = None) -> None:
        super().__init__()
        self._range = (least, most)

    def parse(self, x: str) -> int:
        return int(_number(self, x, int, "a whole number", self._range))


class WholeOrEmpty(Setting[int | None]):
    """A whole number from 1 up, or empty: the default is the preset's."""

    def parse(self, x: str) -> int | None:
        return _number(self, x, int, "empty or a whole number", (1, None)) if x.strip() else None


class NumberOrEmpty(Setting[float | None]):
    """A number from `least` to `most`, or empty."""

    def __init__(self, least: float, most: float) -> None:
        super().__init__()
        self._range = (least, most)

    def parse(self, x: str) -> float | None:
        return _number(self, x, float, "empty or a number", self._range) if x.strip() else None


def setting(options: type, name: str, *, least: float | None = None, most: float | None = None) -> Any:
    """The setting for field `name` of the options of a stage or of the trainer: its type, choices and limits, or
    narrower limits."""
    kind, _ = kind_of(options, name)
    about = fields_of(options)[name][1]
    if about.choices:
        return Choice(about.choices)
    if kind is bool:
        return Switch()
    lowest, highest = about.least if least is None else least, about.most if most is None else most
    assert lowest is not None
    return Whole(int(lowest), None if highest is None else int(highest)) if kind is int else Number(lowest, highest)


def _number(setting: Setting[Any], text: str, kind: type, what: str, limits: tuple[Any, Any]) -> Any:
    least, most = limits
    allowed = f"{what}, {least} or more" if most is None else f"{what} from {least} to {most}"
    try:
        value = kind(text)
    except ValueError:
        raise setting.refuse(f"'{text}'", allowed) from None
    if not least <= value or (most is not None and value > most) or value in (float("inf"), float("-inf")):
        raise setting.refuse(text, allowed)
    return value
