"""`python -m pipeline COMMAND`: everything about a pipeline except running it, which `luigi --module pipeline` does.
Without a command: prints what to run for what.

Settings are given as on luigi's command line: `python -m pipeline why Pretrain --phase 1 --Phase1-lr 5e-4`.
Exit status: 0 success (`why`: complete), 1 (`why`: would run; `clean`, `trackers`: something could not be removed, or
sent; `doctor`, `store verify`: a problem was found; `nights --check`: the night is neither complete nor running; `try`:
a text was refused), 2 unknown command or option, 35 a setting, an input or a task name was refused, 130 Ctrl-C
(`publish` 75; `status --watch`, `tensorboard`, `luigid` 0).
"""

from __future__ import annotations

import argparse
import itertools
import re
import signal
import sys
from collections.abc import Sequence
from typing import Protocol

from luigi.cmdline_parser import CmdlineParser
from luigi.retcodes import retcode

from common.command_line import EXIT_UNKNOWN_OPTION, Parser, refuse_options
from common.errors import UserError, suggestion, unreadable
from common.process import is_ignored
from pipeline.commands import (
    cancel,
    clean,
    compare,
    completion,
    doctor,
    init,
    kubernetes_manifest,
    luigid,
    nights,
    publish,
    report,
    runs,
    status,
    store,
    tensorboard,
    trackers,
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
    "init": init,
    "doctor": doctor,
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
    "trackers": trackers,
    "luigid": luigid,
    "completion": completion,
}
#: Exit status after Ctrl-C, as of a shell.
_EXIT_CTRL_C = 130
#: Commands that run without loading the settings.
_WITHOUT_SETTINGS = ("init", "completion")
MAP = """\
python -m pipeline COMMAND, or luigi --module pipeline TASK. Which does what:

  begin  python -m pipeline init FOLDER          a luigi.cfg for this machine
         python -m pipeline doctor               can a run finish unattended?
  run    luigi --module pipeline BertPhase2      the whole pipeline; resumes it
         luigi --module pipeline BertPhase1      up to the start of phase 2
         luigi --module pipeline Nightly --date 2026-11-21
         luigi --module pipeline Sweep --grid configs/sweep.toml
         luigi --module pipeline MnistMlp        the MLP tutorial
  watch  python -m pipeline status [--watch]     each stage: rate, time, error
         python -m pipeline why TASK             what would run, and why
         python -m pipeline report               one page; also luigid
         python -m pipeline compare              training runs side by side
         python -m pipeline runs                 a line for each training run
         python -m pipeline tensorboard          also trackers: MLflow, W&B
  use    python -m pipeline try [TEXT]           fill [MASK], newest model
         python -m pipeline publish TARGET       hf://org/name, s3://…, folder
  tidy   python -m pipeline clean [--remove]     what is superseded
         python -m pipeline store [VERB]         what machines share
         python -m pipeline cancel STAGE         a job; also manifest
         python -m pipeline nights               the nights of Nightly
         python -m pipeline completion bash      or zsh

A setting: a line of luigi.cfg, or --Phase1-lr 5e-4. More: COMMAND --help."""


def parser() -> argparse.ArgumentParser:
    plain = argparse.RawDescriptionHelpFormatter
    p = Parser(prog="python -m pipeline", description=__doc__, formatter_class=plain)
    p.set_defaults(parser=p)  # for `completion`, which lists its commands
    commands = p.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        described = f"{command.SUMMARY}.\n\nSettings are given as for luigi: --Phase1-lr 5e-4."
        command.add_options(
            commands.add_parser(name, help=command.SUMMARY, description=described, formatter_class=plain)
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


def _parse(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The arguments, and the words that may be luigi's. Exits with one line for an unknown command or option."""
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        near = suggestion(words[0], COMMANDS)
        print(f"error: there is no command {words[0]}; {near}", file=sys.stderr)
        sys.exit(EXIT_UNKNOWN_OPTION)
    every = parser()
    args, unknown = every.parse_known_args(words)
    options = [word for word in unknown if re.match("--[a-z]", word)]
    if options:
        luigis = CmdlineParser._build_parser()
        strange = [word for word in options if word.partition("=")[0] not in luigis._option_string_actions]
        (commands,) = (action for action in every._actions if isinstance(action, argparse._SubParsersAction))
        if strange:
            refuse_options(f"unrecognized arguments: {' '.join(strange)}", commands.choices[args.command], luigis)
    return args, unknown


def main(words: Sequence[str] | None = None) -> int:
    ours, given = _split_settings(sys.argv[1:] if words is None else words)
    if not ours and not given:
        print(MAP)
        return 0
    args, unknown = _parse(ours)
    try:
        # luigi's own parser, so that settings are named and checked as on its command line.
        with CmdlineParser.global_instance(["BertPhase2", *given, *unknown]):
            if args.command not in _WITHOUT_SETTINGS:
                load()
            return COMMANDS[args.command].run(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        print(f"error: {unreadable(error)}", file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _EXIT_CTRL_C
    return int(retcode().scheduling_error)


if __name__ == "__main__":
    if not is_ignored(signal.SIGINT):  # the handler that `import pipeline` installs is for luigi
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
