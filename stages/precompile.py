"""Compile before training starts: `python -m stages.precompile --out DIR --device D -- -m trainer …`

Runs the training command after `--` as a trial: a few steps that leave no checkpoint, log or metric. The result is
`graphs.json`, {"graphs": [{"hash", "operations", "seconds"}]}, and the compiler's cache if the device can reuse it. If
a program of its own compiles the graphs, as neuronx-cc does, {"modules": [{"hash", "seconds"}]} lists its results.

With several machines, each runs this command and compiles into its own part of the cache; the first waits for the
others and alone writes the manifest.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from common.errors import EXIT_INTERRUPTED, UserError
from common.files import disk_errors, read_json, write_json
from common.hashing import InputHashes
from common.options import from_namespace, option
from common.process import PARENT_VARIABLE, node_rank
from stages.directory.command import run
from stages.directory.manifest import Output, StageDirectory
from stages.directory.options import StageOptions, stage_parser
from trainer import registry
from trainer.config import DEVICES
from trainer.machine.kind import SELF_TESTS, test_once, versions
from trainer.registry import compilation_of

GRAPHS, CACHE, _TRIAL = "graphs.json", "cache", "trial"
#: Marker that a machine writes when its part of the cache is compiled.
_NODE_DONE = "node-{}.json"
#: Optimizer steps of a trial for torch.compile, on devices that compile nothing else.
_COMPILE_STEPS = 2
#: How long the first machine waits for the others, which compile the same graphs.
_OTHERS_TIMEOUT_S = 3600.0
_REPORT_EVERY_S, _POLL_EVERY_S = 30.0, 0.2


@dataclass(frozen=True, kw_only=True)
class Graphs:
    """What a training run's graphs depend on besides device and compiler; None: the workload has no such option."""

    #: The settings of the model, or its config.json.
    model: Mapping[str, Any]
    seq_len: int | None
    max_pred_len: int | None
    #: Whether several sequences share a row.
    pack: bool
    micro_batch_size: int
    #: Whether an optimizer step has several micro-steps.
    accumulates: bool
    batches_per_execution: int
    optimizer: str
    #: Whether there is weight decay, and clipping of gradients.
    decays: bool
    clips: bool
    precision: str
    tensor_parallel_size: int
    data_parallel: str
    nnodes: int
    nproc_per_node: int
    # Added later, so part of the identity only where they are not the default.
    grad_reduce_in_bf16: bool = False
    #: Whether some steps have fewer micro-steps than others, and so, with DDP, other graphs.
    grows: bool = False
    sampled_softmax: int = 0


@dataclass(frozen=True, kw_only=True)
class PrecompileOptions(StageOptions):
    """The device the phase will be trained on, and the training command to run as a trial."""

    module: ClassVar = "stages.precompile"
    stage: ClassVar = "precompile"
    #: 2: each machine has its own part of Neuron's cache. 3: the last layer only where something is predicted.
    format_version: ClassVar = 3

    device: str = option("cpu", choices=DEVICES, help="device the phase will be trained on")
    compile: bool = option(False, help="on cpu and cuda: set if the training command has --compile")
    self_test: bool = option(
        True,
        decides=False,
        help="on Trainium, first check that the device computes correctly: once per kind of machine",
    )
    nodes: int = option(1, unit="machines", least=1, decides=False, help="machines that run this command together")
    phase: int | None = option(
        None, help="pretraining phase it is for; part of the identity", decides=False, least=1, most=2
    )
    #: The training command, as arguments of the Python interpreter.
    command: tuple[str, ...] = ()
    #: The graphs as luigi knows them before the data exists; None: derive them from the command.
    graphs: Graphs | None = None

    def parameters(self) -> dict[str, Any]:
        graphs = self.graphs or graphs_of(self.command)
        trained = {"command": list(self.command)} if graphs is None else asdict(graphs)
        later = {field.name: field.default for field in fields(Graphs)}
        trained = {name: one for name, one in trained.items() if later.get(name, MISSING) != one}
        return {**super().parameters(), **trained, "versions": versions(), **flags(self.device)}

    def words(self, out: Path) -> list[str]:
        return [*super().words(out), "--", *self.command]


def graphs_of(command: Sequence[str]) -> Graphs | None:
    """Derive the graphs from a training command; None if it is another command. Raises `UserError`."""
    if "trainer" not in command:
        return None
    from trainer.data.mask_rate import MaskRate
    from trainer.data.shards import ShardSet
    from trainer.options import parse

    at = command.index("trainer")
    machines = _numbers(command[:at], nnodes=1, nproc_per_node=1)
    given = parse(command[at + 1 :])
    run, config, data = given.run, given.config, vars(given.workload)
    model = {name: data.get(name) for name in ("model", "vocab_size", "disable_dropout", "debug")}
    if data.get("next_sentence") is False:
        model["next_sentence"] = False
    if data.get("model_config"):
        model["model_config"] = InputHashes().sha256(data["model_config"])
    shards = ShardSet.open(data["data_dir"]) if "max_pred_len" in data else None
    most_masked = data.get("max_pred_len")
    if shards is not None and shards.max_pred_len is None:
        rate = MaskRate.of(data["masked_lm_prob"], data["final_masked_lm_prob"])
        most_masked = rate.most(shards.seq_len, shards.sequences_per_row or 1)
    named = "fp32" if run.enable_fp32 else "autocast" if run.enable_pt_autocast else config.precision
    return Graphs(
        model={"workload": run.workload, **model},
        seq_len=data.get("seq_len"),
        max_pred_len=most_masked,
        pack=shards is not None and shards.sequences_per_row is not None,
        micro_batch_size=config.micro_batch_size,
        accumulates=config.grad_accum_usteps > 1,
        batches_per_execution=config.batches_per_execution,
        optimizer=config.optimizer,
        decays=config.weight_decay > 0,
        clips=config.max_grad_norm > 0,
        precision=named,
        tensor_parallel_size=config.tensor_parallel_size,
        data_parallel=config.data_parallel,
        nnodes=machines.nnodes,
        nproc_per_node=machines.nproc_per_node,
        grad_reduce_in_bf16=config.grad_reduce_in_bf16,
        grows=grows(config.data_parallel, config.batch_ramp_steps),
        sampled_softmax=data.get("sampled_softmax", 0),
    )


def grows(data_parallel: str, batch_ramp_steps: int) -> bool:
    """Whether a ramp of the batch has graphs of its own: DDP sums gradients in the last micro-step of a step."""
    return data_parallel == "ddp" and batch_ramp_steps > 0


def flags(device: str) -> dict[str, str]:
    """The user's flags for the device's compiler, which are part of its cache keys; for every device that `auto` and
    `neuron` may be."""
    possible = [device] if device in registry.DEVICES else list(registry.DEVICES)
    variables = {compilation_of(name).flags for name in possible} - {None}
    return {name: given for name in sorted(filter(None, variables)) if (given := os.environ.get(name, ""))}


def precompile(work: StageDirectory, *, device: str, compiles: bool, nodes: int, command: list[str]) -> int:
    """Run the trial and complete `work`; returns the number of graphs. Raises `UserError` if the trial fails."""
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
        if program := compilation_of(device).program:
            modules = registry.load(program)(work.path / CACHE).modules(nodes)
            write_json(graphs, {**(read_json(graphs) or {}), "modules": modules})
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
    """Run the training command briefly to compile its graphs into `directory`, if the device compiles any.

    With several nodes, every node runs this; only the first records the stage. Raises `UserError` if the trial fails.
    """
    steps = _steps(device, compiles)
    if not steps:
        return
    node, ramp_steps = node_rank(), _numbers(command, batch_ramp_steps=0).batch_ramp_steps
    options = {
        "--output_dir": str(directory / _TRIAL),
        "--steps_this_run": str(steps),
        "--graphs": str(directory / GRAPHS),
        "--compile_cache": str(directory / CACHE),
        "--batch_ramp_steps": str(min(ramp_steps, steps // 2)),  # so that it ends before the trial
    }
    trial = [sys.executable, *command, "--trial", *(word for option in options.items() for word in option)]
    if program := compilation_of(device).program:
        registry.load(program)(directory / CACHE).run(node, trial, _run)
    else:
        _run(trial, {PARENT_VARIABLE: str(os.getpid())})
    write_json(directory / _NODE_DONE.format(node), {})


def _steps(device: str, compiles: bool) -> int:
    return compilation_of(device).trial_steps or (_COMPILE_STEPS if compiles else 0)


def _numbers(words: Sequence[str], **defaults: int) -> argparse.Namespace:
    """The values of these options among `words`, which have others, too. Raises `UserError`."""
    p = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name, default in defaults.items():
        p.add_argument(f"--{name}", f"--{name.replace('_', '-')}", type=int, default=default)
    try:
        return p.parse_known_args(words)[0]
    except argparse.ArgumentError as error:
        raise UserError(f"{error}, in the command to precompile; allowed here: a number") from None


def _run(words: list[str], environment: dict[str, str]) -> None:
    """Run the trial. Raises `UserError` if it fails."""
    status = subprocess.run(words, env={**os.environ, **environment}, check=False).returncode
    if status == EXIT_INTERRUPTED:
        sys.exit(EXIT_INTERRUPTED)
    if status:
        raise UserError(f"the trial ended with exit status {status}; its output is above")


def _await_nodes(directory: Path, nodes: int) -> None:
    """Wait until all machines have compiled their part. Raises `UserError` on timeout."""
    began = reported = time.monotonic()
    while missing := [node for node in range(nodes) if not (directory / _NODE_DONE.format(node)).exists()]:
        who = f"node{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        now = time.monotonic()
        if now - began > _OTHERS_TIMEOUT_S:
            raise UserError(
                f"{who} did not finish compiling within {_OTHERS_TIMEOUT_S:g} s of this machine; see the output "
                f"there, then run the same again on all of them"
            )
        if now - reported >= _REPORT_EVERY_S:
            reported = now
            print(f"waiting for {who} to finish compiling", file=sys.stderr, flush=True)
        time.sleep(_POLL_EVERY_S)


def parser() -> argparse.ArgumentParser:
    p = stage_parser(PrecompileOptions, __doc__)
    p.add_argument(
        "command", nargs="*", metavar="-- -m trainer …", help="the training command, needed if anything compiles"
    )
    return p


def main() -> None:
    args = parser().parse_args()
    options = from_namespace(PrecompileOptions, args, command=tuple(args.command))
    device = options.device
    if device not in registry.DEVICES:
        from trainer.devices.select import resolve  # imports torch, which only these need

        device = resolve(device)
    if _steps(device, options.compile) and not options.command:
        raise UserError(f"device {device} needs a training command for the trial: … -- -m trainer --data_dir …")
    compiles, command = options.compile, list(options.command)
    if node_rank() > 0:
        try_out(args.out, device=device, compiles=compiles, command=command)
        return
    with StageDirectory.begin(args.out, options.identity) as work:
        if options.self_test and compilation_of(device).is_tested:
            test_once(args.out.parent / SELF_TESTS, device, command, nodes=options.nodes)
        precompile(work, device=device, compiles=compiles, nodes=options.nodes, command=command)


if __name__ == "__main__":
    run(main)
