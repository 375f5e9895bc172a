"""Command lines are refused in one line, with the nearest option that exists, instead of the whole usage."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

#: Exit status of argparse.
EXIT_UNKNOWN_OPTION = 2
_UNKNOWN, _PORTS = "unrecognized arguments: ", 65535


class Parser(argparse.ArgumentParser):
    """Its errors are one line. Names cannot be abbreviated: a typo that begins a name would be taken for it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self._words: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """An option that does not exist is said first: what is missing may be what it was meant for."""
        own = self._words[: self._words.index("--")] if "--" in self._words else self._words
        names = [word.partition("=")[0] for word in own if word.startswith("--")]
        unknown = sorted(set(names).difference(_names(self)), key=names.index)
        if "required" in message and unknown:
            message = f"{_UNKNOWN}{' '.join(unknown)}"
        refuse_options(message, self)


def refuse_options(message: str, *parsers: argparse.ArgumentParser) -> NoReturn:
    """Exit with one line of what `argparse` says; for an unknown option with the nearest one of `parsers`."""
    import difflib

    words = message.removeprefix(_UNKNOWN).split() if message.startswith(_UNKNOWN) else []
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    known = [name for parser in parsers for name in _names(parser)]
    if not options:
        refuse(f"{message}; see --help", EXIT_UNKNOWN_OPTION)
    near = difflib.get_close_matches(options[0], known, n=1)
    refuse(f"unknown option {options[0]}; {f'did you mean {near[0]}?' if near else 'see --help'}", EXIT_UNKNOWN_OPTION)


def _names(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Its options' names, and those of its subcommands."""
    yield from parser._option_string_actions
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                yield from _names(one)


def refuse(text: str, status: int) -> NoReturn:
    print("error:", " ".join(text.split()), file=sys.stderr)
    sys.exit(status)


def port(least: int) -> Callable[[str], int]:
    """Reads the number of a port, for argparse. `least`: 0 if the system may choose one, else 1."""

    def read(text: str) -> int:
        if not (text.isdecimal() and least <= int(text) <= _PORTS):
            raise argparse.ArgumentTypeError(f"{text} is not a port; allowed: {least} to {_PORTS}")
        return int(text)

    return read
