"""`python -m pipeline status | why | report | try | clean | cancel | nights | manifest`: what is done, what would run
and why, how it went, what the model says, what can go, what runs on a cluster; `tensorboard` and
`luigid` serve it to a browser.

Every setting may be given as luigi takes it: `python -m pipeline why Pretrain --phase 1 --Phase1-lr 5e-4`.
Exit status: 0 done (`why`: complete), 1 (`why`: would run; `clean`: something could not be removed), 2 unknown option,
35 a setting, an input or a task name was refused.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from luigi.cmdline_parser import CmdlineParser
from luigi.retcodes import retcode

from common.errors import UserError
from pipeline.commands import (
    cancel,
    clean,
    kubernetes_manifest,
    luigid,
    nights,
    report,
    status,
    tensorboard,
    try_model,
    why,
)
from pipeline.settings.load import load


@dataclass(frozen=True)
class Command:
    """What `python -m pipeline NAME` does."""

    summary: str
    add_options: Callable[[argparse.ArgumentParser], None]
    #: Returns the exit status; raises `UserError`.
    run: Callable[[argparse.Namespace], int]


COMMANDS = {
    "status": Command(status.SUMMARY, status.add_options, status.run),
    "why": Command(why.SUMMARY, why.add_options, why.run),
    "report": Command(report.SUMMARY, report.add_options, report.run),
    "try": Command(try_model.SUMMARY, try_model.add_options, try_model.run),
    "clean": Command(clean.SUMMARY, clean.add_options, clean.run),
    "cancel": Command(cancel.SUMMARY, cancel.add_options, cancel.run),
    "nights": Command(nights.SUMMARY, nights.add_options, nights.run),
    "manifest": Command(kubernetes_manifest.SUMMARY, kubernetes_manifest.add_options, kubernetes_manifest.run),
    "tensorboard": Command(tensorboard.SUMMARY, tensorboard.add_options, tensorboard.run),
    "luigid": Command(luigid.SUMMARY, luigid.add_options, luigid.run),
}


def parser() -> argparse.ArgumentParser:
    plain = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser(
        prog="python -m pipeline", description=__doc__, formatter_class=plain, allow_abbrev=False
    )
    commands = p.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        described = f"{command.summary}.\n\nSettings are taken as luigi takes them: --Phase1-lr 5e-4."
        command.add_options(
            commands.add_parser(
                name, help=command.summary, description=described, formatter_class=plain, allow_abbrev=False
            )
        )
    return p


def _apart(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words without the settings among them (`--Phase1-lr 5e-4`, `--Phase1-lr=5e-4`), and the settings."""
    ours, given = list[str](), list[str]()
    rest = iter(words)
    for word in rest:
        if re.match("--[A-Z]", word):
            given += [word] if "=" in word else [word, *itertools.islice(rest, 1)]
        else:
            ours.append(word)
    return ours, given


def main(words: Sequence[str] | None = None) -> int:
    ours, given = _apart(sys.argv[1:] if words is None else words)
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
