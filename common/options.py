"""Command-line options as fields of frozen dataclasses: parser, checks and command line are made from the fields.

    @dataclass(frozen=True, kw_only=True)
    class CutOptions:
        seq_len: int = option(help="tokens in a row", least=8)
        pack: bool = option(False, help="several sequences in a row")

        def __post_init__(self) -> None:
            check(self)

`add_options(parser, CutOptions)` adds --seq-len and --pack/--no-pack; `from_namespace(CutOptions, args)` makes the
instance; `words(instance)` is the command line that makes it again. A field's type T is bool, int, float, str, Path,
Duration or Secret, or `T | None` or `tuple[T, ...]` of one. Values are converted here and not by argparse, so that a
bad one gives a one-line error and no usage text. A class with `option_separator = "_"` gets --seq_len.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from common.duration import Duration
from common.errors import UserError
from common.secrets import Secret, revealed_by_parent

T = TypeVar("T")

_KEY = "option"
_KINDS: dict[type, tuple[Callable[[str], Any], str]] = {
    int: (int, "a whole number"),
    float: (float, "a number"),
    Secret: (revealed_by_parent, "an address"),
    Path: (Path, "a path"),
    Duration: (Duration.parse, Duration.ALLOWED),
    str: (str, "a text"),
}


@dataclasses.dataclass(frozen=True)
class Option:
    """What a field's metadata says about the option."""

    help: str
    unit: str = ""
    #: Limits of a number, both allowed; None: no limit.
    least: float | None = None
    most: float | None = None
    #: An exclusive upper limit.
    below: float | None = None
    choices: tuple[str, ...] = ()
    #: On the command line, preferred first; without dashes, a positional argument; None: not on the command line.
    names: tuple[str, ...] | None = ()
    metavar: str | None = None
    #: Title of the group in --help.
    group: str = ""
    #: Whether it affects the result.
    decides: bool = True
    #: Whether the default is left out of `deciding`: an option added later then does not change old identities.
    omit_default: bool = False
    #: Words that a single `--name` takes, as in argparse's nargs; "": a tuple's option is repeated.
    nargs: str = ""

    @property
    def is_positional(self) -> bool:
        return bool(self.names) and not self.names[0].startswith("-")  # type: ignore[index]

    @property
    def allowed(self) -> str:
        """The limits in words: "from 1 to 9"."""
        if self.choices:
            return ", ".join(self.choices)
        if self.least is not None and self.most is not None:
            return f"from {self.least:g} to {self.most:g}"
        limits = ((self.least, "{:g} or more"), (self.most, "at most {:g}"), (self.below, "below {:g}"))
        return " and ".join(text.format(limit) for limit, text in limits if limit is not None)

    def allows(self, value: float) -> bool:
        """Whether a number is finite and within the limits."""
        return (
            math.isfinite(value)
            and (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )


def option(default: Any = dataclasses.MISSING, **about: Any) -> Any:
    """A field that is an option; without a default it is required. `about`: the fields of `Option`."""
    return dataclasses.field(default=default, metadata={_KEY: Option(**about)})


def fields_of(cls: Any) -> dict[str, tuple[dataclasses.Field[Any], Option]]:
    """The options of a dataclass or its instance, by field name."""
    return {f.name: (f, f.metadata[_KEY]) for f in dataclasses.fields(cls) if _KEY in f.metadata}


def name_of(cls: Any, field_name: str) -> str:
    """The preferred name on the command line: --seq-len, or for a positional argument its metavar."""
    about = fields_of(cls)[field_name][1]
    if about.is_positional:
        return about.metavar or field_name
    return about.names[0] if about.names else "--" + field_name.replace("_", getattr(cls, "option_separator", "-"))


def deciding(instance: Any) -> dict[str, Any]:
    """The values that affect the result, by field name."""
    return {
        name: getattr(instance, name)
        for name, (_, about) in fields_of(instance).items()
        if about.decides and not is_left_out(instance, name, getattr(instance, name))
    }


def is_left_out(cls: Any, name: str, value: Any) -> bool:
    """Whether `value` is left out of an identity: the default of an option that says so (`omit_default`)."""
    field, about = fields_of(cls)[name]
    return about.omit_default and bool(value == field.default)


def check(instance: Any) -> None:
    """Raise `UserError`, one line, for the first value that is not allowed. None is always allowed."""
    for name, (_, about) in fields_of(instance).items():
        value = getattr(instance, name)
        for one in value if isinstance(value, tuple) else (value,):
            if one is None or isinstance(one, bool):
                continue
            number = isinstance(one, int | float)
            if (about.choices and one not in about.choices) or (number and not about.allows(one)):
                raise _refusal(type(instance), name, one)


def add_options(
    parser: argparse.ArgumentParser,
    *classes: type,
    defaults: Mapping[str, Any] = types.MappingProxyType({}),
    without: Collection[str] = (),
) -> None:
    """Add every option of `classes` to `parser`, except `without`. `defaults`: by field name, shown instead of
    the options' own; give them to `from_namespace` too."""
    groups: dict[str, Any] = {"": parser}
    every = [(cls, name, *found) for cls in classes for name, found in fields_of(cls).items() if name not in without]
    for cls, name, field, about in every:
        if about.names is None:
            continue
        if about.group not in groups:
            groups[about.group] = parser.add_argument_group(about.group)
        kind, many = kind_of(cls, name)
        required = field.default is dataclasses.MISSING
        default = defaults.get(name, field.default)
        shown = f" ({default})" if _is_worth_showing(default) and kind is not bool else ""
        arguments: dict[str, Any] = {"help": (about.help + shown).replace("%", "%%"), "default": None}
        names = about.names or (name_of(cls, name),)
        if kind is bool:
            arguments["action"] = argparse.BooleanOptionalAction
        else:
            arguments["metavar"] = about.metavar or _metavar(about)
            if many:
                arguments |= {"nargs": about.nargs} if about.nargs else {"action": "append"}
        if about.is_positional:
            names = (name,)
            arguments["nargs"] = ("+" if required else "*") if many else None if required else "?"
            arguments.pop("action", None)
        else:
            arguments |= {"dest": name, "required": required}
        groups[about.group].add_argument(*names, **arguments)


def from_namespace(cls: type[T], args: argparse.Namespace, **others: Any) -> T:
    """The instance that the command line describes; `others`: fields that are not on it. Raises `UserError`."""
    values = dict(others)
    for name, (_, about) in fields_of(cls).items():
        given = getattr(args, name, None)
        if about.names is None or given is None or given == []:
            continue
        kind, many = kind_of(cls, name)
        if kind is bool:
            values[name] = given
        else:
            values[name] = tuple(_convert(cls, name, one) for one in given) if many else _convert(cls, name, given)
    return cls(**values)


def words(instance: Any, *last: str) -> list[str]:
    """The command line that makes `instance` again, positional arguments (then `last`) first; values at their defaults
    are left out."""
    positional: list[str] = []
    found: list[str] = []
    for name, (field, about) in fields_of(instance).items():
        value = getattr(instance, name)
        if about.names is None or value is None or value == field.default:
            continue
        shown = name_of(instance, name)
        if isinstance(value, bool):
            found.append(shown if value else f"--no-{shown.removeprefix('--')}")
            continue
        every = value if isinstance(value, tuple) else (value,)
        texts = [one if isinstance(one, str) else str(one) for one in every]
        if about.is_positional:
            positional += texts
        elif about.nargs:
            found += [shown, *texts]
        else:  # a secret is a separate word, which its launcher hides
            found += [
                word for text in texts for word in ([shown, text] if isinstance(text, Secret) else [f"{shown}={text}"])
            ]
    return [*positional, *last, *found]


@functools.cache
def _hints(cls: type) -> Mapping[str, Any]:
    return typing.get_type_hints(cls)


def kind_of(cls: type, name: str) -> tuple[type, bool]:
    """The type of a field's value, and whether it is a tuple of them."""
    hint = _hints(cls)[name]
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        hint = next(one for one in typing.get_args(hint) if one is not type(None))
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], True
    return hint, False


def _convert(cls: type, name: str, text: str) -> Any:
    try:
        return _KINDS[kind_of(cls, name)[0]][0](text)
    except ValueError:
        raise _refusal(cls, name, text) from None


def _refusal(cls: type, name: str, value: object) -> UserError:
    about = fields_of(cls)[name][1]
    what = "" if about.choices else _KINDS[kind_of(cls, name)[0]][1]
    allowed = " ".join(part for part in (what, about.allowed) if part)
    return UserError(f"{name_of(cls, name)} is {value}; allowed: {allowed}")


def _metavar(about: Option) -> str | None:
    return "{" + ",".join(about.choices) + "}" if about.choices else about.unit.upper().replace(" ", "-") or None


def _is_worth_showing(default: object) -> bool:
    return default is not dataclasses.MISSING and default not in (None, "", ())
