"""`python -m stages.precompile --out DIR --device D -- -m trainer …`: what can be compiled before training starts, is.

It runs the training command that follows `--` as a trial: a few steps that leave no checkpoint, log or metric. What
comes of it is `graphs.json`, {"graphs": [{"hash", "operations", "seconds"}]}, and the compiler's cache where the
device can use it again.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from stages.command import run
from stages.manifest import Identity, Output, StageDirectory
from trainer.config import DEVICES
from trainer.errors import EXIT_INTERRUPTED, UserError
from trainer.files import disk_errors, read_json, write_json
from trainer.process import PARENT_VARIABLE, node_rank

GRAPHS, CACHE, _TRIAL = "graphs.json", "cache", "trial"
#: Optimizer steps of a trial. On Neuron as in the tutorial; every graph of ours has been met after two.
_STEPS = {"neuron": 10, "xla": 3}
#: The same with torch.compile, elsewhere.
_COMPILE_STEPS = 2
#: Extracts the graphs of a command, then compiles them in parallel.
_PARALLEL_COMPILE = "neuron_parallel_compile"


def precompile(work: StageDirectory, *, device: str, compiles: bool, command: list[str]) -> int:
    """Fill `work`; returns the number of graphs. Raises `UserError` if the trial fails."""
    graphs = work.path / GRAPHS
    if not _steps(device, compiles):
        print(f"device {device}: operations run one by one here, there is nothing to compile", file=sys.stderr)
        write_json(graphs, {"graphs": []})
    else:
        trial = work.path / _TRIAL
        shutil.rmtree(trial, ignore_errors=True)
        try_out(work.path, device=device, compiles=compiles, command=command)
        if device == "neuron":
            write_json(graphs, {"graphs": cached_graphs(work.path / CACHE)})
        with disk_errors(trial):
            shutil.rmtree(trial, ignore_errors=True)
    listed: list[dict[str, Any]] = (read_json(graphs) or {})["graphs"]
    for graph in listed:
        print(f"graph {graph['hash']}: {graph['operations']} operations, {graph['seconds']} s", file=sys.stderr)
    work.finish([Output.of(work.path, graphs)], {"graphs": len(listed)})
    return len(listed)


def try_out(directory: Path, *, device: str, compiles: bool, command: list[str]) -> None:
    """A short run of the training command, whose graphs are compiled into `directory`, if anything compiles here.

    With several nodes each takes part; the first alone keeps the account of it. Raises `UserError` if it fails.
    """
    steps = _steps(device, compiles)
    options = {
        "--output_dir": str(directory / _TRIAL),
        "--steps_this_run": str(steps),
        "--graphs": str(directory / GRAPHS),
        "--compile_cache": str(directory / CACHE),
    }
    if steps:
        _run(device, [*command, "--trial", *(word for option in options.items() for word in option)])


def _steps(device: str, compiles: bool) -> int:
    return _STEPS.get(device, _COMPILE_STEPS if compiles else 0)


def _run(device: str, command: list[str]) -> None:
    """Run `python command…`, on Neuron under its parallel compiler. Raises `UserError`."""
    words = [sys.executable, *command]
    if device == "neuron":
        program = shutil.which(_PARALLEL_COMPILE)
        if program is None:
            raise UserError(f"{_PARALLEL_COMPILE} is not here; it comes with torch-neuronx (docs/trainium.md)")
        words = [program, *words]
        environment = dict(os.environ)
    else:
        environment = {**os.environ, PARENT_VARIABLE: str(os.getpid())}
    status = subprocess.run(words, env=environment, check=False).returncode
    if status == EXIT_INTERRUPTED:
        sys.exit(EXIT_INTERRUPTED)
    if status:
        raise UserError(f"the trial ended with exit status {status}; what it said is above")


def cached_graphs(cache: Path) -> list[dict[str, Any]]:
    """The modules in a Neuron compiler cache. Raises `UserError` if one has not been compiled, or there is none.

    The seconds are between the files of a module; how many operations it has, only the compiler could say.
    """
    modules = sorted(path.parent for path in cache.rglob("MODULE_*/model.hlo_module.pb*"))
    if not modules:
        raise UserError(f"{_PARALLEL_COMPILE} left no graph in {cache}; what it said is above")
    graphs = []
    for module in modules:
        compiled = module / "model.neff"
        if not compiled.exists():
            raise UserError(f"{module} was not compiled; see its model.log, then run the same again")
        began = min(path.stat().st_mtime for path in module.iterdir())
        seconds = round(compiled.stat().st_mtime - began, 1)
        graphs.append({"hash": module.name.removeprefix("MODULE_"), "operations": None, "seconds": seconds})
    return graphs


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m stages.precompile", description=__doc__)
    p.add_argument("--out", type=Path, required=True, help="stage directory to fill")
    p.add_argument("--device", choices=DEVICES, default="cpu", help="what the phase will be trained on")
    p.add_argument("--compile", action="store_true", help="on cpu and cuda: the training command has --compile")
    p.add_argument(
        "command", nargs="*", metavar="-- -m trainer …", help="the training command, where anything compiles"
    )
    return p


def main() -> None:
    args = parser().parse_args()
    if (args.device in _STEPS or args.compile) and not args.command:
        raise UserError(f"device {args.device} needs the training command to try: … -- -m trainer --data_dir …")
    if node_rank() > 0:
        try_out(args.out, device=args.device, compiles=args.compile, command=args.command)
        return
    parameters = {"device": args.device, "compile": args.compile, "command": args.command}
    with StageDirectory.begin(args.out, lambda: Identity("precompile", 1, parameters=parameters)) as work:
        precompile(work, device=args.device, compiles=args.compile, command=args.command)


if __name__ == "__main__":
    run(main)
