"""`python -m stages.precompile --out DIR --device D -- -m trainer …`: what can be compiled before training starts, is.

It runs the training command that follows `--` as a trial: a few steps that leave no checkpoint, log or metric. What
comes of it is `graphs.json`, {"graphs": [{"hash", "operations", "seconds"}]}, and the compiler's cache where the
device can use it again. On Neuron there is {"modules": [{"hash", "seconds"}]} too, what neuronx-cc made of the graphs.

With several machines each runs this command, and each compiles into a part of the cache that is its own; the first
waits for the others, and alone says that it is complete.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common.errors import EXIT_INTERRUPTED, UserError
from common.files import disk_errors, read_json, write_json
from common.hashing import InputHashes
from common.process import PARENT_VARIABLE, node_rank
from stages.directory.command import run
from stages.directory.manifest import Identity, Output, StageDirectory
from trainer.config import DEVICES
from trainer.devices.neuron_cache import CC_FLAGS, compiled_modules, merge_flags, node_cache, use_cache

GRAPHS, CACHE, _TRIAL = "graphs.json", "cache", "trial"
#: What a machine leaves when its part of the cache is compiled.
_NODE_DONE = "node-{}.json"
FORMAT_VERSION = 2  # 2: each machine has its own part of Neuron's cache
#: Optimizer steps of a trial. On Neuron as in the tutorial; every graph of ours has been met after two.
_STEPS = {"neuron": 10, "xla": 3}
#: The same with torch.compile, elsewhere.
_COMPILE_STEPS = 2
#: Extracts the graphs of a command, then compiles them in parallel.
_PARALLEL_COMPILE = "neuron_parallel_compile"
#: Seconds that the first machine waits for the others' compilers: they compile the same graphs as its own.
_OTHERS_TIMEOUT_S = 3600.0
_TOLD_EVERY_S, _LOOK_EVERY_S = 30.0, 0.2


def precompile(work: StageDirectory, *, device: str, compiles: bool, nodes: int, command: list[str]) -> int:
    """Fill `work`; returns the number of graphs. Raises `UserError` if the trial fails."""
    graphs = work.path / GRAPHS
    with disk_errors(work.path):
        for node in range(nodes):
            (work.path / _NODE_DONE.format(node)).unlink(missing_ok=True)
        shutil.rmtree(work.path / _TRIAL, ignore_errors=True)
    if not _steps(device, compiles):
        print(f"device {device}: operations run one by one here, there is nothing to compile", file=sys.stderr)
        write_json(graphs, {"graphs": []})
    else:
        try_out(work.path, device=device, compiles=compiles, command=command)
        _await_nodes(work.path, nodes)
        if device == "neuron":
            # Each machine has compiled the same graphs.
            parts = [compiled_modules(node_cache(work.path / CACHE, node)) for node in range(nodes)]
            write_json(graphs, {**(read_json(graphs) or {}), "modules": parts[0]})
        with disk_errors(work.path):
            shutil.rmtree(work.path / _TRIAL, ignore_errors=True)
            for node in range(nodes):
                (work.path / _NODE_DONE.format(node)).unlink(missing_ok=True)
    record: dict[str, list[dict[str, Any]]] = read_json(graphs) or {}
    for graph in record["graphs"]:
        print(f"graph {graph['hash']}: {graph['operations'] or '?'} operations, {graph['seconds']} s", file=sys.stderr)
    for module in record.get("modules", []):
        print(f"module {module['hash']}: compiled in {module['seconds']} s", file=sys.stderr)
    work.finish([Output.of(work.path, graphs)], {name: len(listed) for name, listed in record.items()})
    return len(record["graphs"])


def try_out(directory: Path, *, device: str, compiles: bool, command: list[str]) -> None:
    """A short run of the training command, whose graphs are compiled into `directory`, if anything compiles here.

    With several nodes each takes part; the first alone keeps the account of it. Raises `UserError` if it fails.
    """
    steps = _steps(device, compiles)
    if not steps:
        return
    node = node_rank()
    options = {
        "--output_dir": str(directory / _TRIAL),
        "--steps_this_run": str(steps),
        "--graphs": str(directory / GRAPHS),
        "--compile_cache": str(directory / CACHE),
    }
    trial = [sys.executable, *command, "--trial", *(word for option in options.items() for word in option)]
    if device != "neuron":
        _run(trial, {PARENT_VARIABLE: str(os.getpid())})
    else:
        cache = node_cache(directory / CACHE, node)
        with use_cache(cache, functools.partial(print, file=sys.stderr, flush=True)):
            _run([_parallel_compiler(), *trial], _compiler_environment(cache))
        compiled_modules(cache)
    write_json(directory / _NODE_DONE.format(node), {})


def _steps(device: str, compiles: bool) -> int:
    return _STEPS.get(device, _COMPILE_STEPS if compiles else 0)


def _parallel_compiler() -> str:
    """Raises `UserError`."""
    program = shutil.which(_PARALLEL_COMPILE)
    if program is None:
        raise UserError(f"{_PARALLEL_COMPILE} is not here; it comes with torch-neuronx (docs/trainium.md)")
    return program


def _compiler_environment(cache: Path) -> dict[str, str]:
    """Variables that have neuron_parallel_compile compile the graphs in `cache`. It looks where its own environment
    says, not where the trainer's does, which it starts."""
    flags, _ = merge_flags(os.environ.get(CC_FLAGS, ""), f"--cache_dir={cache} --retry_failed_compilation")
    return {"NEURON_COMPILE_CACHE_URL": str(cache), CC_FLAGS: flags}


def _run(words: list[str], environment: dict[str, str]) -> None:
    """Run the trial. Raises `UserError`."""
    status = subprocess.run(words, env={**os.environ, **environment}, check=False).returncode
    if status == EXIT_INTERRUPTED:
        sys.exit(EXIT_INTERRUPTED)
    if status:
        raise UserError(f"the trial ended with exit status {status}; what it said is above")


def _await_nodes(directory: Path, nodes: int) -> None:
    """Wait until all machines have compiled their part. Raises `UserError` if one does not."""
    began = told = time.monotonic()
    while missing := [node for node in range(nodes) if not (directory / _NODE_DONE.format(node)).exists()]:
        who = f"node{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        now = time.monotonic()
        if now - began > _OTHERS_TIMEOUT_S:
            raise UserError(
                f"{who} did not finish compiling within {_OTHERS_TIMEOUT_S:g} s of this machine; see what it said "
                f"there, then run the same again on all of them"
            )
        if now - told >= _TOLD_EVERY_S:
            told = now
            print(f"waiting for {who} to finish compiling", file=sys.stderr, flush=True)
        time.sleep(_LOOK_EVERY_S)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m stages.precompile", description=__doc__)
    p.add_argument("--out", type=Path, required=True, help="stage directory to fill")
    p.add_argument("--device", choices=DEVICES, default="cpu", help="what the phase will be trained on")
    p.add_argument("--compile", action="store_true", help="on cpu and cuda: the training command has --compile")
    p.add_argument("--nodes", type=int, default=1, help="machines that run this command together (1)")
    p.add_argument(
        "command", nargs="*", metavar="-- -m trainer …", help="the training command, where anything compiles"
    )
    return p


def identity(args: argparse.Namespace) -> Identity:
    """The command, and the content of the model's config that it names. Raises `UserError`."""
    parameters = {"device": args.device, "compile": args.compile, "command": args.command}
    options = dict(itertools.pairwise(args.command))
    inputs = {}
    if config := options.get("--model_config"):
        inputs["model_config"] = InputHashes().sha256(config)
    return Identity("precompile", FORMAT_VERSION, parameters=parameters, inputs=inputs)


def main() -> None:
    args = parser().parse_args()
    if args.device == "auto":
        from trainer.devices.select import automatic  # imports torch, which no other device needs here

        args.device = automatic()
    if (args.device in _STEPS or args.compile) and not args.command:
        raise UserError(f"device {args.device} needs the training command to try: … -- -m trainer --data_dir …")
    if node_rank() > 0:
        try_out(args.out, device=args.device, compiles=args.compile, command=args.command)
        return
    with StageDirectory.begin(args.out, lambda: identity(args)) as work:
        precompile(work, device=args.device, compiles=args.compile, nodes=args.nodes, command=args.command)


if __name__ == "__main__":
    run(main)
