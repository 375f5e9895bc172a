"""The trainer's command line, generated from the fields of `TrainConfig`, `RunOptions`, `TrackerOptions` and the
workload's options.

`python -m trainer.options` prints docs/options.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from common.command_line import Parser
from common.errors import UserError
from common.options import add_options, check, fields_of, from_namespace, name_of, option
from trainer.config import CHANGEABLE, TrainConfig
from trainer.data.batch_ramp import BatchRamp
from trainer.data.order import require_whole_batches
from trainer.devices.base import DeviceOptions
from trainer.metrics.trackers.options import TrackerOptions
from trainer.parallel.mesh import Mesh
from trainer.seeds import derive_seed
from trainer.workloads import WORKLOADS
from trainer.workloads.base import Workload

BERT = next(iter(WORKLOADS))


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Workload, process options, and the tutorials' aliases of `TrainConfig` fields."""

    option_separator: ClassVar[str] = "_"

    workload: str = option(
        BERT, choices=tuple(WORKLOADS), help="what is trained; each has its own options: --workload NAME --help"
    )
    doctor: bool = option(False, decides=False, help="report what this machine has and lacks, and exit")
    self_test: bool = option(
        False, decides=False, names=("--self-test",),
        help="check that the device computes the same as the CPU, in single operations and in training, and exit",
    )  # fmt: skip
    spawn: int | None = option(
        None, decides=False, unit="workers",
        help="start this many workers on this machine, as torchrun --nproc_per_node does (NEURON_NUM_DEVICES of the "
        "DDP tutorial)",
    )  # fmt: skip
    local_rank: int = option(
        0, decides=False, names=("--local_rank", "--local-rank"),
        help="passed by older launchers and ignored: torchrun sets LOCAL_RANK",
    )  # fmt: skip
    phase2: bool = option(False, group="training", help="second phase: starts from the weights of the first")
    enable_fp32: bool = option(False, group="training", help="the same as --precision fp32")
    enable_pt_autocast: bool = option(False, group="training", help="the same as --precision autocast")
    shards_per_ckpt: int = option(
        1, group="checkpoints", decides=False, least=0, unit="shards",
        help="checkpoint after every worker has seen as many samples as this many shards hold; 0: never",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class CommandLine:
    """The parsed options; `to_config` resolves those that depend on the workload, the data or the workers."""

    run: RunOptions
    #: An instance of the workload's `options`.
    workload: Any
    config: TrainConfig
    trackers: TrackerOptions


def parser(workload: str = BERT) -> argparse.ArgumentParser:
    """A parser with all options of a workload.

    The tutorials' options keep their names; the help notes each default that differs from the tutorials'.
    """
    p = Parser(
        prog="python -m trainer",
        description=f"Train {workload}, on one worker, or on several under torchrun.",
        epilog=f"--allow_changes takes: {', '.join(CHANGEABLE)}.",
    )
    kind = WORKLOADS[workload]
    add_options(p, RunOptions, kind.options, TrainConfig, TrackerOptions, defaults=kind.defaults, without=kind.without)
    return p


def parse(words: Sequence[str] | None = None) -> CommandLine:
    """Parse a command line (None: this process's) with the options of the workload it names. Raises `UserError`."""
    first = argparse.ArgumentParser(prog="python -m trainer", add_help=False, allow_abbrev=False)
    first.add_argument("--workload")
    name = from_namespace(RunOptions, first.parse_known_args(words)[0]).workload
    kind = WORKLOADS[name]
    args = parser(name).parse_args(words)
    if len([given for given in (args.precision, args.enable_fp32, args.enable_pt_autocast) if given]) > 1:
        raise UserError("--precision, --enable_fp32 and --enable_pt_autocast exclude each other; give one of them")
    if getattr(args, "budget", None) is not None and args.max_steps is not None:
        raise UserError("--budget and --max_steps exclude each other; give one of them")
    defaults = {
        cls: {k: v for k, v in kind.defaults.items() if k in fields_of(cls)} for cls in (RunOptions, TrainConfig)
    }
    return CommandLine(
        from_namespace(RunOptions, args, **defaults[RunOptions]),
        from_namespace(kind.options, args),
        from_namespace(TrainConfig, args, **defaults[TrainConfig]),
        from_namespace(TrackerOptions, args),
    )


def to_config(given: CommandLine, mesh: Mesh) -> tuple[TrainConfig, Workload]:
    """The validated configuration and its workload. Raises `UserError`."""
    run, config = given.run, given.config
    if run.local_rank > 0 and "LOCAL_RANK" not in os.environ:
        raise UserError(
            f"--local_rank {run.local_rank} without LOCAL_RANK: this launcher does not say how many workers there "
            f"are; start them with torchrun"
        )
    workload = WORKLOADS[run.workload].of(given.workload)
    workers = mesh.data_parallel_size
    config = dataclasses.replace(
        config,
        output_dir=config.output_dir.expanduser(),
        metrics_file=config.metrics_file and config.metrics_file.expanduser(),
        graphs=config.graphs and config.graphs.expanduser(),
        phase=2 if run.phase2 else 1,
        phase1_end_step=config.phase1_end_step if run.phase2 else 0,
        lr=workload.learning_rate(config.lr, workers),
        precision="fp32" if run.enable_fp32 else "autocast" if run.enable_pt_autocast else config.precision,
        ckpt_interval_steps=_ckpt_interval_steps(given, workload, workers),
        resume=config.resume or config.resume_ckpt_path is not None or config.resume_step != -1,
        trial=config.trial or os.environ.get("NEURON_EXTRACT_GRAPHS_ONLY") == "1",
    )
    if config.budget is None:
        config = config.lasting(workload.max_steps(config.max_steps, config.global_batch_size(workers)))
    elif config.trial:  # a trial is not measured, nor does its length matter
        config = dataclasses.replace(config, schedule="linear")  # any warm-up fits
        config = config.lasting(max(config.max_steps, config.warmup_steps))
    whole = config.global_batch_size(workers)
    require_whole_batches(workload.rows_per_shard, whole)
    BatchRamp(config.batch_ramp_steps, config.batch_ramp_parts).require_whole_parts(
        whole, config.micro_batch_size * config.batches_per_execution * workers
    )
    return config, workload


def _ckpt_interval_steps(given: CommandLine, workload: Workload, workers: int) -> int:
    """Steps between checkpoints, at least one if derived from `--shards_per_ckpt`; 0: none."""
    if given.config.ckpt_interval_steps != -1:
        return given.config.ckpt_interval_steps
    if not given.run.shards_per_ckpt:
        return 0
    samples = given.run.shards_per_ckpt * workers * int(workload.rows_per_shard.sum()) / len(workload.rows_per_shard)
    return max(1, round(samples / given.config.global_batch_size(workers)))


def device_options(config: TrainConfig, workload: Workload, mesh: Mesh) -> DeviceOptions:
    """The options of this worker's device; the root's device reports compiled graphs."""
    return DeviceOptions(
        precision=config.wanted_precision,
        batches_per_execution=config.batches_per_execution,
        compile_cache=config.compile_cache,
        reports=config.output_dir if mesh.is_root and config.graphs is not None else None,
        count_operations=config.trial,
        compile=config.compile,
        data_parallel=config.data_parallel,
        shard_optimizer=config.shard_optimizer,
        allow_fallbacks=config.allowed_fallbacks,
        threads=workload.threads,
        rounding_seed=derive_seed(config.seed, "Neuron stochastic rounding"),
    )


def markdown() -> str:
    """Generate docs/options.md."""
    bert, mnist = WORKLOADS[BERT], WORKLOADS["mnist"]
    lines = [
        "# Options of the trainer",
        "",
        "Made by `python -m trainer.options > docs/options.md` from the fields that define the options. Options keep "
        "their names in the tutorials' scripts. A switch is on with its name and off with `--no-NAME`. An option "
        "marked *fixed* must stay the same when a run is resumed: a change is refused, and the error names it. The "
        "others do not affect the result, act only when a run begins, or are checked through another value "
        "(`--grad_accum_usteps` through the global batch).",
        "",
        "A micro-step is one forward and backward pass of one worker; an optimizer step sums several.",
        "",
        f"`--allow_changes` permits a resumed run to change {', '.join(f'`{name}`' for name in CHANGEABLE)}. Of these, "
        "`micro_batch_size` is `--batch_size`, `global_batch_size` the samples in an optimizer step of all workers, "
        "and `data` the content of `--data_dir`.",
    ]
    groups: dict[str, list[str]] = {}
    for cls in (RunOptions, bert.options, TrainConfig, TrackerOptions):
        for group, row in _rows(cls, {}):
            groups.setdefault(group, []).append(row)
    for group, rows in groups.items():
        lines += ["", f"## {group.capitalize() or 'Command'}", "", *_HEADER, *rows]
    lines += ["", "## With `--workload mnist`", "", *_HEADER]
    lines += [row for _, row in _rows(mnist.options, {})]
    lines += [row for cls in (RunOptions, TrainConfig) for _, row in _rows(cls, mnist.defaults, only=mnist.defaults)]
    missing = [
        name_of(cls, name) for cls in (RunOptions, TrainConfig) for name in fields_of(cls) if name in mnist.without
    ]
    lines += ["", f"It has no {', '.join(f'`{name}`' for name in missing)}, nor the options of the model above."]
    return "\n".join(lines) + "\n"


_HEADER = ("| option | default | allowed | on resume | meaning |", "|---|---|---|---|---|")


def _rows(cls: type, defaults: Mapping[str, Any], only: Mapping[str, Any] | None = None) -> Iterator[tuple[str, str]]:
    """Yield (group, table row) for each option of a class."""
    for name, (field, about) in fields_of(cls).items():
        if about.names is None or (only is not None and name not in only):
            continue
        default = defaults.get(name, field.default)
        shown = "" if default in (None, ()) else f"`{default}`"
        if isinstance(default, bool):
            shown = "on" if default else "off"
        allowed = ", ".join(f"`{choice}`" for choice in about.choices) or about.allowed
        fixed, text = "fixed" if about.decides else "", about.help.replace("*", r"\*")
        yield about.group, f"| `{name_of(cls, name)}` | {shown} | {allowed} | {fixed} | {text} |"


if __name__ == "__main__":
    print(markdown(), end="")
