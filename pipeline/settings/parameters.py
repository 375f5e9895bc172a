"""The types of values in luigi.cfg, as luigi parameters whose errors name the value and what is allowed.

Luigi's own parameters say what is allowed only for a number out of range and, in random order, for a choice; not for
"1.5" as an integer or "perhaps" as a boolean; and OptionalIntParameter accepts -3.
"""

from __future__ import annotations

import configparser
import contextlib
import math
import re
from collections.abc import Collection, Iterator
from typing import Any, TypeVar
from urllib.parse import urlsplit

import luigi

from common.duration import Duration
from common.errors import UserError
from common.options import fields_of, kind_of
from common.secrets import Secret

T = TypeVar("T")


@contextlib.contextmanager
def in_section(name: str) -> Iterator[None]:
    """Name the section in a `UserError` of the block."""
    try:
        yield
    except UserError as error:
        raise UserError(f"[{name}] {error}") from None


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
            raise self.refuse(x, ", ".join(choice or "empty" for choice in self._choices))
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
            raise UserError(
                f"{self._attribute_name} is not an address; allowed: empty, or http:// or https:// with a host"
            )
        return Secret(x)


class Sha256OrEmpty(Setting[str]):
    """A sha256 in hex, or empty."""

    def parse(self, x: str) -> str:
        if x.strip() and not re.fullmatch("[0-9a-fA-F]{64}", x.strip()):
            raise self.refuse(x, "empty or 64 hexadecimal digits")
        return x.strip().lower()


class Words(Setting[str]):
    """Words that `pattern` matches, separated by spaces; or empty."""

    def __init__(self, pattern: str, allowed: str) -> None:
        super().__init__()
        self._pattern, self._allowed = re.compile(pattern), allowed

    def parse(self, x: str) -> str:
        for word in x.split():
            if not self._pattern.fullmatch(word):
                raise self.refuse(word, f"empty, or {self._allowed}, separated by spaces")
        return x.strip()


class Switch(Setting[bool]):
    """true or false."""

    def parse(self, x: str) -> bool:
        states = configparser.ConfigParser.BOOLEAN_STATES
        if x.lower() not in states:
            raise self.refuse(x, "true, false")
        return states[x.lower()]


class TextOrEmpty(Setting[str | None]):
    """A text, or None."""

    def parse(self, x: str) -> str | None:
        return x.strip() or None


class DurationOrEmpty(Setting[Duration | None]):
    """A time, or empty."""

    def parse(self, x: str) -> Duration | None:
        try:
            return Duration.parse(x.strip()) if x.strip() else None
        except ValueError:
            raise self.refuse(f"'{x}'", f"empty or {Duration.ALLOWED}") from None


class _Number(Setting[Any]):
    def __init__(self, kind: type, least: float, most: float | None, empty: bool) -> None:
        super().__init__()
        self._kind, self._least, self._most, self._empty = kind, least, most, empty

    def parse(self, x: str) -> Any:
        if self._empty and not x.strip():
            return None
        what = ("empty or " if self._empty else "") + ("a whole number" if self._kind is int else "a number")
        limits = f", {self._least} or more" if self._most is None else f" from {self._least} to {self._most}"
        try:
            value = self._kind(x)
        except ValueError:
            raise self.refuse(f"'{x}'", what + limits) from None
        if not self._least <= value <= (math.inf if self._most is None else self._most) or math.isinf(value):
            raise self.refuse(x, what + limits)
        return value


def number(least: float, most: float | None = None, *, empty: bool = False) -> Any:
    """A number from `least` to `most`; None if it may be `empty` and is."""
    return _Number(float, least, most, empty)


def whole(least: float, most: float | None = None, *, empty: bool = False) -> Any:
    """A whole number from `least` to `most`; None if it may be `empty` and is."""
    return _Number(int, least, most, empty)


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
    return _Number(kind, lowest, highest, empty=False)
