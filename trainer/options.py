"""The trainer's command line: the options of the Neuron tutorials' scripts, and ours beside them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from common.errors import UserError
from trainer.config import CHANGEABLE, DATA_PARALLEL, DEVICES, NON_FINITE, OPTIMIZERS, PRECISIONS, TrainConfig
from trainer.data.order import SampleOrder
from trainer.devices.base import DeviceOptions
from trainer.parallel.mesh import Mesh
from trainer.seeds import derive_seed
from trainer.workloads import WORKLOADS
from trainer.workloads.base import Workload

BERT = next(iter(WORKLOADS))
LR_HELP = "peak learning rate; of mnist: times the number of workers, as in its tutorial"
OPTIMIZER_HELP = (
    f"one of {', '.join(OPTIMIZERS)}; with --precision auto AdamW_FP32OptimParams means bf16-sr, AdamW_FP32ParamsCopy "
    f"bf16-master; the tutorial's default is AdamW_FP32OptimParams"
)
PRECISION_HELP = (
    f"one of {', '.join(PRECISIONS)}: autocast has fp32 weights and bf16 products, bf16-sr bf16 weights rounded "
    f"by chance, bf16-master bf16 weights with an fp32 copy; sums, moments and losses are fp32; auto: by the "
    f"optimizer's name, else autocast where the hardware has bf16, else fp32"
)
NON_FINITE_HELP = (
    f"{' or '.join(NON_FINITE)}, when a step's loss, gradients or weights are not finite: skip goes back to the last "
    f"checkpoint and leaves out the batch of that step; stop ends the run"
)
REPLICA_CHECK_HELP = (
    "optimizer steps between two comparisons of the weights and moments of workers that should hold the same; before "
    "each checkpoint they are compared in any case; 0: only then"
)
DATA_PARALLEL_HELP = (
    f"one of {', '.join(DATA_PARALLEL)}. allreduce sums the gradients in a fixed order after the last micro-step: take "
    f"it unless you need the other. ddp is torch's DistributedDataParallel (gradient_as_bucket_view=True), which sums "
    f"beside the backward pass: take it where the all-reduce of a large model is a good part of a step. Both give the "
    f"same curve up to rounding. What ddp costs: after its first step it puts its buckets into another order, so a "
    f"resumed run adds in another order than an uninterrupted one, and with more than 2 workers it no longer ends with "
    f"the same bytes"
)

RESUME_STEP_HELP = (
    "roll back to the checkpoint of this global step, which implies --resume_ckpt: newer ones are set aside in "
    "OUTPUT_DIR/checkpoints/abandoned-N, each time; -1: go on from the newest"
)
RESUME_CKPT_PATH_HELP = (
    "the checkpoint (a directory) that training in OUTPUT_DIR begins with, which implies --resume_ckpt: one of phase "
    "1 gives phase 2 its weights, one of the same phase is gone on from. The same command again goes on from "
    "OUTPUT_DIR's own newest checkpoint, if that began with this one, else it is refused. One of OUTPUT_DIR's own, of "
    "the same phase, is rolled back to, as by --resume_step"
)


def parser(workload: str = BERT) -> argparse.ArgumentParser:
    """Every option of a workload, its unit, and its default. The tutorials' options keep their names; where a default
    is not the tutorials', the help says so."""
    p = argparse.ArgumentParser(
        prog="python -m trainer",
        description=f"Train {workload}, on one worker, or on several under torchrun.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    _add_workload(p)
    _add_data(p)
    WORKLOADS[workload].add_options(p)
    _add_training(p)
    _add_checkpoints(p)
    _add_machine(p)
    p.set_defaults(**WORKLOADS[workload].defaults)
    return p


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line (None: this process'), by the options of the workload that it names."""
    first = argparse.ArgumentParser(prog="python -m trainer", add_help=False, allow_abbrev=False)
    _add_workload(first)
    chosen, _ = first.parse_known_args(words)
    return parser(chosen.workload).parse_args(words)


def _add_workload(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--workload", choices=WORKLOADS, default=BERT,
        help="what is trained; each has options of its own: --workload NAME --help",
    )  # fmt: skip


def _add_data(p: argparse.ArgumentParser) -> None:
    data = p.add_argument_group("data")
    data.add_argument(
        "--data_dir",
        type=Path,
        default=Path("~/examples_datasets/bert_pretrain_wikicorpus_tokenized_hdf5_seqlen128/"),
        help="directory with the data set: *_training_*.hdf5 shards; of mnist: its .gz files",
    )
    data.add_argument("--output_dir", type=Path, default=Path("output"), help="checkpoints, logs and metrics go here")
    data.add_argument(
        "--metrics_file", type=Path, default=None, help="summary of the run, JSON (default: OUTPUT_DIR/results.json)"
    )


def _add_training(p: argparse.ArgumentParser) -> None:
    train = p.add_argument_group("training")
    train.add_argument("--batch_size", type=int, default=8, help="samples in a micro-step of one worker")
    train.add_argument("--grad_accum_usteps", type=int, default=64, help="micro-steps in an optimizer step")
    train.add_argument(
        "--steps_this_run", type=int, default=-1, help="stop after this optimizer step of the phase; -1: the last"
    )
    train.add_argument("--lr", type=float, default=4e-4, help=LR_HELP)
    train.add_argument("--schedule", default="linear", help="after the warm-up: linear, down to 0; or constant")
    train.add_argument("--warmup_steps", type=int, default=2000, help="optimizer steps of linear warm-up")
    train.add_argument("--optimizer", default="AdamW", help=OPTIMIZER_HELP)
    train.add_argument("--weight_decay", type=float, default=0.01, help="of all but biases and norms")
    train.add_argument("--max_grad_norm", type=float, default=1.0, help="L2 norm gradients are clipped to; 0: never")
    train.add_argument("--seed", type=int, default=12349, help="of initial weights, sample order and dropout")
    train.add_argument("--non_finite", default="skip", help=NON_FINITE_HELP)
    train.add_argument(
        "--non_finite_limit", type=int, default=3, help="batches of a phase that --non_finite skip may leave out"
    )
    train.add_argument("--replica_check_steps", type=int, default=100, help=REPLICA_CHECK_HELP)
    precision = train.add_mutually_exclusive_group()
    precision.add_argument("--precision", default="auto", help=PRECISION_HELP)
    precision.add_argument("--enable_fp32", action="store_true", help="the same as --precision fp32")
    precision.add_argument("--enable_pt_autocast", action="store_true", help="the same as --precision autocast")


def _add_checkpoints(p: argparse.ArgumentParser) -> None:
    ckpt = p.add_argument_group("checkpoints")
    ckpt.add_argument("--resume_ckpt", action="store_true", help="go on from the newest whole checkpoint, if any")
    ckpt.add_argument("--resume_step", type=int, default=-1, help=RESUME_STEP_HELP)
    ckpt.add_argument("--resume_ckpt_path", type=Path, default=None, help=RESUME_CKPT_PATH_HELP)
    ckpt.add_argument(
        "--allow_changes", nargs="+", default=[], metavar="NAME",
        help="what a resumed run may change although it decides the result; the checkpoints record the change. One of "
        + ", ".join(CHANGEABLE),
    )  # fmt: skip
    ckpt.add_argument(
        "--shards_per_ckpt", type=int, default=1,
        help="checkpoint after every worker has seen as many samples as this many shards hold; 0: no",
    )  # fmt: skip
    ckpt.add_argument("--ckpt_interval_steps", type=int, default=None, help="optimizer steps between checkpoints; "
                      "0: none by steps; overrides --shards_per_ckpt")  # fmt: skip
    ckpt.add_argument("--ckpt_interval_minutes", type=float, default=0.0, help="minutes between checkpoints; 0: none")
    ckpt.add_argument(
        "--num_ckpts_to_keep", type=int, default=2, help="newest checkpoints to keep; -1: all; the tutorial keeps 1"
    )
    ckpt.add_argument(
        "--minimal_ckpt", action="store_true",
        help="leave the optimizer out of the checkpoint that ends the phase: a third of the size, and all that phase 2 "
        "needs; those before it have it, so that an interrupted phase can go on",
    )  # fmt: skip


def _add_machine(p: argparse.ArgumentParser) -> None:
    machine = p.add_argument_group("machine")
    machine.add_argument("--device", default="auto", help=f"one of {', '.join(DEVICES)}")
    machine.add_argument("--compile", action="store_true", help="have torch.compile make kernels, on cpu and cuda")
    machine.add_argument(
        "--compile_cache", default=None, help="directory for compiled graphs (default: the compiler's)"
    )
    machine.add_argument(
        "--spawn", type=int, default=None, metavar="N",
        help="start N workers on this machine, as torchrun --nproc_per_node=N would (NEURON_NUM_DEVICES of the DDP "
        "tutorial)",
    )  # fmt: skip
    machine.add_argument(
        "--local_rank", "--local-rank", type=int, default=0, metavar="N",
        help="passed by older launchers, and not needed: LOCAL_RANK, which torchrun sets, counts",
    )  # fmt: skip
    machine.add_argument("--doctor", action="store_true", help="say what this machine has and lacks, and end")
    machine.add_argument(
        "--trial", action="store_true",
        help="only have the graphs compiled: no checkpoint, log or metric is written, no loss believed",
    )  # fmt: skip
    machine.add_argument(
        "--graphs", type=Path, default=None, metavar="FILE",
        help="list of compiled graphs, JSON: written with --trial; else a graph that is not in it is told",
    )  # fmt: skip
    machine.add_argument("--batches_per_execution", type=int, default=1, help="micro-batches in one compiled graph")
    machine.add_argument("--data_parallel", default="allreduce", help=DATA_PARALLEL_HELP)
    machine.add_argument("--collective_timeout", type=float, default=600.0, help="seconds workers wait for each other")
    machine.add_argument(
        "--spot_watch", action="store_true",
        help="on EC2: save and stop (exit status 75) at a spot notice, save and go on at a rebalance recommendation",
    )  # fmt: skip
    machine.add_argument("--print_grad_norm", action="store_true", help="show the gradient norm on the console line")
    machine.add_argument("--record_samples", action="store_true", help="note (shard, row) of every sample, to check on "
                         "the order: OUTPUT_DIR/samples-<rank>.jsonl")  # fmt: skip
    machine.add_argument("--log_interval", type=int, default=1, help="optimizer steps between console lines")


def to_config(args: argparse.Namespace, mesh: Mesh) -> tuple[TrainConfig, Workload]:
    """The validated configuration, and what it trains. Raises `UserError`."""
    if args.local_rank > 0 and "LOCAL_RANK" not in os.environ:
        raise UserError(
            f"--local_rank {args.local_rank} without LOCAL_RANK: this launcher does not say how many workers there "
            f"are; start them with torchrun"
        )
    workload = WORKLOADS[args.workload].of(args)
    output_dir = args.output_dir.expanduser()
    phase = 2 if args.phase2 else 1
    global_batch_size = args.batch_size * args.grad_accum_usteps * mesh.data_parallel_size
    max_steps = workload.max_steps(args, max(1, global_batch_size))
    config = TrainConfig(
        output_dir=output_dir,
        metrics_file=args.metrics_file or output_dir / "results.json",
        phase=phase,
        phase1_end_step=args.phase1_end_step if phase == 2 else 0,
        micro_batch_size=args.batch_size,
        grad_accum_usteps=args.grad_accum_usteps,
        max_steps=max_steps,
        stop_step=max_steps if args.steps_this_run < 0 else min(args.steps_this_run, max_steps),
        warmup_steps=args.warmup_steps,
        schedule=args.schedule,
        lr=workload.learning_rate(args, mesh),
        optimizer=args.optimizer,
        weight_decay=args.weight_decay,
        max_grad_norm=args.max_grad_norm,
        seed=args.seed,
        precision=_precision(args),
        device=args.device,
        tensor_parallel_size=args.tensor_parallel_size,
        data_parallel=args.data_parallel,
        ckpt_interval_steps=_interval(args, workload, mesh),
        ckpt_interval_minutes=args.ckpt_interval_minutes,
        num_ckpts_to_keep=args.num_ckpts_to_keep,
        replica_check_steps=args.replica_check_steps,
        non_finite=args.non_finite,
        non_finite_limit=args.non_finite_limit,
        minimal_ckpt=args.minimal_ckpt,
        resume=args.resume_ckpt or args.resume_ckpt_path is not None or args.resume_step != -1,
        resume_ckpt_path=args.resume_ckpt_path,
        resume_step=args.resume_step,
        allow_changes=tuple(args.allow_changes),
        print_grad_norm=args.print_grad_norm,
        log_interval=args.log_interval,
        record_samples=args.record_samples,
        compile=args.compile,
        compile_cache=args.compile_cache,
        trial=args.trial or os.environ.get("NEURON_EXTRACT_GRAPHS_ONLY") == "1",
        graphs=args.graphs,
        batches_per_execution=args.batches_per_execution,
        collective_timeout_s=args.collective_timeout,
        spot_watch=args.spot_watch,
    )
    SampleOrder(workload.rows_per_shard, seed=0, global_batch_size=global_batch_size)
    return config, workload


def device_options(config: TrainConfig, workload: Workload, mesh: Mesh) -> DeviceOptions:
    """What the device of this worker is told; the root's reports what it compiles."""
    return DeviceOptions(
        precision=config.wanted_precision,
        batches_per_execution=config.batches_per_execution,
        compile_cache=config.compile_cache,
        reports=config.output_dir if mesh.is_root and config.graphs is not None else None,
        count_operations=config.trial,
        compile=config.compile,
        threads=workload.threads,
        rounding_seed=derive_seed(config.seed, "Neuron stochastic rounding"),
    )


def _precision(args: argparse.Namespace) -> str:
    if args.enable_fp32:
        return "fp32"
    return "autocast" if args.enable_pt_autocast else str(args.precision)


def _interval(args: argparse.Namespace, workload: Workload, mesh: Mesh) -> int:
    """Steps between checkpoints; `--shards_per_ckpt` in steps of at least one, 0: none."""
    if args.ckpt_interval_steps is not None:
        return int(args.ckpt_interval_steps)
    rows = workload.rows_per_shard
    workers = mesh.data_parallel_size
    samples: float = args.shards_per_ckpt * workers * int(rows.sum()) / len(rows)
    if not args.shards_per_ckpt:
        return 0
    return max(1, round(samples / max(1, int(args.batch_size * args.grad_accum_usteps * workers))))
