"""The trainer's command line: the options of the Neuron tutorials' scripts, and ours beside them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from trainer.config import DEVICES, OPTIMIZERS, PRECISIONS, PRESETS, ModelConfig, TrainConfig
from trainer.data.order import SampleOrder
from trainer.data.shards import ShardSet
from trainer.errors import UserError
from trainer.parallel.mesh import Mesh


def parser() -> argparse.ArgumentParser:
    """Every option, its unit, and its default; the tutorials' options keep their names and defaults."""
    p = argparse.ArgumentParser(
        prog="python -m trainer",
        description="Pretrain BERT for one phase, on one worker, or on several under torchrun.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    _add_data(p)
    _add_model(p)
    _add_training(p)
    _add_checkpoints(p)
    _add_machine(p)
    return p


def _add_data(p: argparse.ArgumentParser) -> None:
    data = p.add_argument_group("data")
    data.add_argument(
        "--data_dir",
        type=Path,
        default=Path("~/examples_datasets/bert_pretrain_wikicorpus_tokenized_hdf5_seqlen128/"),
        help="directory with *_training_*.hdf5 shards",
    )
    data.add_argument("--output_dir", type=Path, default=Path("output"), help="checkpoints, logs and metrics go here")
    data.add_argument(
        "--metrics_file", type=Path, default=None, help="summary of the run, JSON (default: OUTPUT_DIR/results.json)"
    )
    data.add_argument("--seq_len", type=int, default=None, help="tokens in a row (default: what the shards have)")
    data.add_argument("--max_pred_len", type=int, default=20, help="masked positions in a row, at most")


def _add_model(p: argparse.ArgumentParser) -> None:
    model = p.add_argument_group("model")
    model.add_argument("--model", choices=PRESETS, default="large", help="a published size")
    model.add_argument("--model_config", type=Path, default=None, help="a Hugging Face config.json instead of --model")
    model.add_argument("--vocab_size", type=int, default=None, help="entries of the vocabulary (default: 30522)")
    model.add_argument("--disable_dropout", action="store_true", help="train without dropout")
    model.add_argument("--debug", action="store_true", help="the tutorials' toy model: 1 layer, 2 heads, hidden 16")


def _add_training(p: argparse.ArgumentParser) -> None:
    train = p.add_argument_group("training")
    train.add_argument("--batch_size", type=int, default=8, help="sequences in a micro-step of one worker")
    train.add_argument("--grad_accum_usteps", type=int, default=64, help="micro-steps in an optimizer step")
    train.add_argument("--max_steps", type=int, default=28125, help="optimizer steps in the phase (the schedule's end)")
    train.add_argument(
        "--steps_this_run", type=int, default=-1, help="stop after this step of the phase; -1: max_steps"
    )
    train.add_argument("--lr", type=float, default=4e-4, help="peak learning rate")
    train.add_argument("--warmup_steps", type=int, default=2000, help="optimizer steps of linear warm-up")
    train.add_argument("--optimizer", default="AdamW", help=f"one of {', '.join(OPTIMIZERS)}")
    train.add_argument("--weight_decay", type=float, default=0.01, help="of all but biases and LayerNorms")
    train.add_argument("--max_grad_norm", type=float, default=1.0, help="L2 norm gradients are clipped to; 0: never")
    train.add_argument("--seed", type=int, default=12349, help="of initial weights, sample order and dropout")
    train.add_argument("--phase2", action="store_true", help="second phase: starts from the weights of the first")
    train.add_argument("--phase1_end_step", type=int, default=28125, help="global step at which phase 1 ended")
    precision = train.add_mutually_exclusive_group()
    precision.add_argument("--precision", default="auto", help=f"one of {', '.join(PRECISIONS)}")
    precision.add_argument("--enable_fp32", action="store_true", help="the same as --precision fp32")
    precision.add_argument("--enable_pt_autocast", action="store_true", help="the same as --precision autocast")


def _add_checkpoints(p: argparse.ArgumentParser) -> None:
    ckpt = p.add_argument_group("checkpoints")
    ckpt.add_argument("--resume_ckpt", action="store_true", help="go on from the newest whole checkpoint, if any")
    ckpt.add_argument("--resume_step", type=int, default=-1, help="resume from this global step; -1: the newest")
    ckpt.add_argument("--resume_ckpt_path", type=Path, default=None, help="a checkpoint directory to start from")
    ckpt.add_argument(
        "--shards_per_ckpt", type=int, default=1,
        help="checkpoint after every worker has seen as many samples as this many shards hold",
    )  # fmt: skip
    ckpt.add_argument("--ckpt_interval_steps", type=int, default=None, help="optimizer steps between checkpoints; "
                      "0: none by steps; overrides --shards_per_ckpt")  # fmt: skip
    ckpt.add_argument("--ckpt_interval_minutes", type=float, default=0.0, help="minutes between checkpoints; 0: none")
    ckpt.add_argument("--num_ckpts_to_keep", type=int, default=2, help="newest checkpoints to keep; -1: all")
    ckpt.add_argument(
        "--minimal_ckpt", action="store_true",
        help="leave the optimizer out: a third of the size, good to start phase 2 from, but not to resume from",
    )  # fmt: skip


def _add_machine(p: argparse.ArgumentParser) -> None:
    machine = p.add_argument_group("machine")
    machine.add_argument("--device", default="auto", help=f"one of {', '.join(DEVICES)}")
    machine.add_argument("--tensor_parallel_size", type=int, default=1, help="workers that share one copy of the model")
    machine.add_argument("--collective_timeout", type=float, default=600.0, help="seconds workers wait for each other")
    machine.add_argument("--print_grad_norm", action="store_true", help="show the gradient norm on the console line")
    machine.add_argument("--record_samples", action="store_true", help="note (shard, row) of every sample, to check on "
                         "the order: OUTPUT_DIR/samples-<rank>.jsonl")  # fmt: skip
    machine.add_argument("--log_interval", type=int, default=1, help="optimizer steps between console lines")


def to_config(args: argparse.Namespace, mesh: Mesh) -> TrainConfig:
    """The validated configuration. Opens the data set for what the options leave open. Raises `UserError`."""
    data_dir = args.data_dir.expanduser()
    output_dir = args.output_dir.expanduser()
    shards = ShardSet.open(data_dir, seq_len=args.seq_len, max_pred_len=args.max_pred_len)
    phase = 2 if args.phase2 else 1
    config = TrainConfig(
        model=_model(args),
        data_dir=data_dir,
        output_dir=output_dir,
        metrics_file=args.metrics_file or output_dir / "results.json",
        phase=phase,
        phase1_end_step=args.phase1_end_step if phase == 2 else 0,
        seq_len=shards.seq_len,
        max_pred_len=args.max_pred_len,
        micro_batch_size=args.batch_size,
        grad_accum_usteps=args.grad_accum_usteps,
        max_steps=args.max_steps,
        stop_step=args.max_steps if args.steps_this_run < 0 else min(args.steps_this_run, args.max_steps),
        warmup_steps=args.warmup_steps,
        lr=args.lr,
        optimizer=args.optimizer,
        weight_decay=args.weight_decay,
        max_grad_norm=args.max_grad_norm,
        seed=args.seed,
        precision=_precision(args),
        device=args.device,
        tensor_parallel_size=args.tensor_parallel_size,
        ckpt_interval_steps=_interval(args, shards, mesh),
        ckpt_interval_minutes=args.ckpt_interval_minutes,
        num_ckpts_to_keep=args.num_ckpts_to_keep,
        minimal_ckpt=args.minimal_ckpt,
        resume=args.resume_ckpt,
        resume_ckpt_path=args.resume_ckpt_path,
        resume_step=args.resume_step,
        print_grad_norm=args.print_grad_norm,
        log_interval=args.log_interval,
        record_samples=args.record_samples,
        collective_timeout_s=args.collective_timeout,
    )
    SampleOrder(shards.rows_per_shard, seed=0, global_batch_size=config.global_batch_size(mesh.data_parallel_size))
    return config


def _model(args: argparse.Namespace) -> ModelConfig:
    changes = {} if args.vocab_size is None else {"vocab_size": args.vocab_size}
    if args.model_config is not None:
        try:
            config = json.loads(args.model_config.read_text())
        except (OSError, ValueError) as error:
            raise UserError(f"--model_config {args.model_config}: {error}; give a Hugging Face config.json") from error
        model = ModelConfig.of_hugging_face({**config, **changes})
    else:
        model = ModelConfig.preset("debug" if args.debug else args.model, **changes)
    return model.without_dropout() if args.disable_dropout else model


def _precision(args: argparse.Namespace) -> str:
    if args.enable_fp32:
        return "fp32"
    return "autocast" if args.enable_pt_autocast else str(args.precision)


def _interval(args: argparse.Namespace, shards: ShardSet, mesh: Mesh) -> int:
    """Steps between checkpoints; `--shards_per_ckpt` in steps of at least one."""
    if args.ckpt_interval_steps is not None:
        return int(args.ckpt_interval_steps)
    workers = mesh.data_parallel_size
    samples: float = args.shards_per_ckpt * workers * shards.rows / len(shards.names)
    return max(1, round(samples / int(args.batch_size * args.grad_accum_usteps * workers)))
