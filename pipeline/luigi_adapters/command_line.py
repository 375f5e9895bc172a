"""A one-line error for a task or an option that luigi does not know, with the nearest one that it does.

* `luigi.cmdline_parser.CmdlineParser.__init__` raises TaskClassNotFoundException for an unknown task, which nobody
  catches.
* `CmdlineParser.get_task_obj` raises ParameterException or ValueError for a parameter that is missing or malformed.
* `CmdlineParser._build_parser` makes an argparse parser, whose `error` prints the usage with every option.
"""

from __future__ import annotations

import argparse
import re
import sys
from typing import NoReturn

import luigi
from luigi.cmdline_parser import CmdlineParser
from luigi.parameter import MissingParameterException, ParameterException
from luigi.retcodes import retcode
from luigi.task_register import Register

from common.errors import suggestion

#: Exit status of argparse.
EXIT_UNKNOWN_OPTION = 2
_UNKNOWN = "unrecognized arguments: "
_build_parser, _get_task_obj = CmdlineParser._build_parser, CmdlineParser.get_task_obj


def install() -> None:
    CmdlineParser._build_parser = staticmethod(_make)  # type: ignore[method-assign]
    CmdlineParser.get_task_obj = _task  # type: ignore[method-assign]


def _make(root_task: str | None = None, help_all: bool = False) -> argparse.ArgumentParser:
    if root_task is not None and root_task not in (known := _tasks()):
        ours = [
            name for name, task in known.items() if "pipeline.tasks" in task.__module__ and not task.__subclasses__()
        ]
        _refuse(f"there is no task {root_task}; {suggestion(root_task, ours)}", retcode().scheduling_error)
    parser: argparse.ArgumentParser = _build_parser(root_task, help_all)  # type: ignore[no-untyped-call]
    parser.allow_abbrev = False  # a typo that happens to be the start of a name would be taken for it
    parser.error = lambda message: refuse_options(message, parser)  # type: ignore[method-assign]
    return parser


def _task(parser: CmdlineParser) -> luigi.Task:
    name = parser.known_args.root_task
    try:
        task: luigi.Task = _get_task_obj(parser)  # type: ignore[no-untyped-call]
    except MissingParameterException as error:
        missing = re.findall(r"requires the '(\w+)' parameter", str(error))
        _refuse(f"{name} needs {f'--{missing[0]}' if missing else error}; give it", retcode().scheduling_error)
    except (ParameterException, ValueError) as error:
        _refuse(f"{name}: {error}; see --help", retcode().scheduling_error)
    return task


def _tasks() -> dict[str, type[luigi.Task]]:
    """By name; sections of settings are registered as tasks, too."""
    return {task.get_task_family(): task for task in Register._reg if not issubclass(task, luigi.Config)}


def refuse_options(message: str, *parsers: argparse.ArgumentParser) -> NoReturn:
    """Exit with one line of what `argparse` says; for an unknown option with the nearest one of `parsers`."""
    import difflib

    words = message.removeprefix(_UNKNOWN).split() if message.startswith(_UNKNOWN) else []
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    known = [name for parser in parsers for name in parser._option_string_actions]
    if not options:
        _refuse(f"{message}; see --help", EXIT_UNKNOWN_OPTION)
    near = difflib.get_close_matches(options[0], known, n=1)
    _refuse(f"unknown option {options[0]}; {f'did you mean {near[0]}?' if near else 'see --help'}", EXIT_UNKNOWN_OPTION)


def _refuse(text: str, status: int) -> NoReturn:
    print("error:", " ".join(text.split()), file=sys.stderr)
    sys.exit(status)
