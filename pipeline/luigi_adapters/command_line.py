"""A one-line error for a task or an option that luigi does not know, with the nearest one that it does.

* `luigi.cmdline_parser.CmdlineParser.__init__` raises TaskClassNotFoundException for an unknown task, which nobody
  catches.
* `CmdlineParser.get_task_obj` raises ParameterException or ValueError for a parameter that is missing or malformed.
* `CmdlineParser._build_parser` makes an argparse parser, whose `error` prints the usage with every option.
"""

from __future__ import annotations

import argparse
import re

import luigi
from luigi.cmdline_parser import CmdlineParser
from luigi.interface import core
from luigi.parameter import MissingParameterException, ParameterException
from luigi.retcodes import retcode
from luigi.task_register import Register

from common.command_line import refuse, refuse_options
from common.errors import suggestion

_build_parser, _get_task_obj = CmdlineParser._build_parser, CmdlineParser.get_task_obj


def install() -> None:
    CmdlineParser._build_parser = staticmethod(_make)  # type: ignore[method-assign]
    CmdlineParser.get_task_obj = _task  # type: ignore[method-assign]


def _make(root_task: str | None = None, help_all: bool = False) -> argparse.ArgumentParser:
    if root_task is not None and root_task not in (known := _tasks()):
        ours = [
            name for name, task in known.items() if "pipeline.tasks" in task.__module__ and not task.__subclasses__()
        ]
        refuse(f"there is no task {root_task}; {suggestion(root_task, ours)}", retcode().scheduling_error)
    parser: argparse.ArgumentParser = _build_parser(root_task, help_all)  # type: ignore[no-untyped-call]
    parser.allow_abbrev = False  # a typo that happens to be the start of a name would be taken for it
    parser.error = lambda message: refuse_options(message, parser)  # type: ignore[method-assign]
    return parser


def _task(parser: CmdlineParser) -> luigi.Task:
    name, workers = parser.known_args.root_task, core().workers
    if workers < 1:
        refuse(f"--workers is {workers}; allowed: 1 or more", retcode().scheduling_error)
    try:
        task: luigi.Task = _get_task_obj(parser)  # type: ignore[no-untyped-call]
    except MissingParameterException as error:
        missing = re.findall(r"requires the '(\w+)' parameter", str(error))
        refuse(f"{name} needs {f'--{missing[0]}' if missing else error}; give it", retcode().scheduling_error)
    except (ParameterException, ValueError) as error:
        refuse(f"{name}: {error}; see --help", retcode().scheduling_error)
    return task


def _tasks() -> dict[str, type[luigi.Task]]:
    """By name; sections of settings are registered as tasks, too."""
    return {task.get_task_family(): task for task in Register._reg if not issubclass(task, luigi.Config)}
