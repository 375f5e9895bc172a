"""`python -m pipeline COMMAND`: everything about a pipeline except running it, which `luigi --module pipeline` does.

Settings are given as to luigi: `python -m pipeline why Pretrain --phase 1 --Phase1-lr 5e-4`.
Exit status: 0 success (`why`: complete), 1 (`why`: would run; `clean`: something could not be removed), 2 unknown
option, 35 a setting, an input or a task name was refused.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Sequence
from typing import Protocol

from luigi.cmdline_parser import CmdlineParser
from luigi.retcodes import retcode

from common.errors import UserError
from pipeline.commands import (
    cancel,
    clean,
    compare,
    kubernetes_manifest,
    luigid,
    nights,
    publish,
    report,
    runs,
    status,
    store,
    tensorboard,
    try_model,
    why,
)
from pipeline.settings.load import load


class Command(Protocol):
    """A module of `pipeline.commands`."""

    SUMMARY: str

    def add_options(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, args: argparse.Namespace) -> int:
        """Returns the exit status; raises `UserError`."""
        ...


COMMANDS: dict[str, Command] = {
    "status": status,
    "why": why,
    "report": report,
    "compare": compare,
    "runs": runs,
    "try": try_model,
    "publish": publish,
    "clean": clean,
    "store": store,
    "cancel": cancel,
    "nights": nights,
    "manifest": kubernetes_manifest,
    "tensorboard": tensorboard,
    "luigid": luigid,
}


def parser() -> argparse.ArgumentParser:
    plain = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser(
        prog="python -m pipeline", description=__doc__, formatter_class=plain, allow_abbrev=False
    )
    commands = p.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        described = f"{command.SUMMARY}.\n\nSettings are taken as luigi takes them: --Phase1-lr 5e-4."
        command.add_options(
            commands.add_parser(
                name, help=command.SUMMARY, description=described, formatter_class=plain, allow_abbrev=False
            )
        )
    return p


def _split_settings(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words without settings (`--Phase1-lr 5e-4`, `--Phase1-lr=5e-4`), and the settings."""
    ours, given = list[str](), list[str]()
    rest = iter(words)
    for word in rest:
        if re.match("--[A-Z]", word):
            given += [word] if "=" in word else [word, *itertools.islice(rest, 1)]
        else:
            ours.append(word)
    return ours, given


def main(words: Sequence[str] | None = None) -> int:
    ours, given = _split_settings(sys.argv[1:] if words is None else words)
    args, unknown = parser().parse_known_args(ours)
    try:
        # luigi's own parser, so that settings are named and checked as on its command line.
        with CmdlineParser.global_instance(["BertPhase2", *given, *unknown]):
            load()
            return COMMANDS[args.command].run(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        print(f"error: cannot read {error.filename}: {error.strerror}; check its permissions", file=sys.stderr)
    return int(retcode().scheduling_error)


if __name__ == "__main__":
    sys.exit(main())
