"""`python -m pipeline init`: a luigi.cfg for this machine, or for the machines that a scheduler has."""

from __future__ import annotations

import argparse
import shlex
import textwrap
from pathlib import Path

from common.errors import UserError, suggestion
from common.files import disk_errors, durable_file
from pipeline.settings.config_file import project_file

SUMMARY = "a commented luigi.cfg for this machine, in this folder or another"
#: What `--for` takes: the keys of `choices.CHOICES`.
TARGETS = ("laptop", "gpu", "trn1", "trn2", "trn3", "slurm", "kubernetes")
_FILE = "luigi.cfg"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=Path(),
        metavar="FOLDER",
        help="where to write it (default: the current folder)",
    )
    parser.add_argument(
        "--for", dest="target", metavar="NAME", help=f"one of {', '.join(TARGETS)}; default: what is found here"
    )
    parser.add_argument("--text", metavar="PATH", help="text to train on: a file or a quoted glob")
    parser.add_argument("--force", action="store_true", help="replace an existing luigi.cfg")


def run(args: argparse.Namespace) -> int:
    """Raises `UserError`."""
    from pipeline.commands.init.choices import Text, draft_for
    from pipeline.commands.init.surroundings import Surroundings

    if args.target is not None and args.target not in TARGETS:
        raise UserError(f"--for is {args.target}; {suggestion(args.target, TARGETS)}")
    path = args.folder / _FILE
    if args.folder.exists() and not args.folder.is_dir():
        raise UserError(f"{args.folder} is a file; give a folder")
    if path.exists() and path.samefile(project_file(_FILE)):
        raise UserError(
            f"{path} is the project's own, with every default; give a folder: python -m pipeline init FOLDER"
        )
    if path.exists() and not args.force:
        raise UserError(f"{path} already exists; give another folder, or --force to replace it")
    text = Text.of(args.text) if args.text is not None else None
    seen = Surroundings.look()
    target, why = seen.suggests if args.target is None else (args.target, "as asked")
    draft, missing = draft_for(target, seen, text, args.folder)
    header = [
        *textwrap.wrap(f"For {target}. Made by `python -m pipeline init` on a machine with {seen}.", 118),
        "A key that is not here has its default, which is in",
        f"  {project_file(_FILE)}",
        "with its unit. Before a long run: python -m pipeline doctor",
    ]
    content = "\n".join([*(f"# {line}" for line in header), *draft.lines(), ""])
    with disk_errors(args.folder):
        args.folder.mkdir(parents=True, exist_ok=True)
    with durable_file(path) as file:
        file.write(content.encode())
    print(f"{path}: for {target}, {why} ({seen})")
    for line in missing:
        print(f"edit:  {line}")
    there = "" if args.folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(args.folder))} && "
    print(f"next:  {there}python -m pipeline doctor")
    print(f"then:  {there}luigi --module pipeline BertPhase2")
    return 0
