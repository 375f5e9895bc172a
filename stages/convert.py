"""`python -m stages.convert IN OUT --to native|hf|pt`: a checkpoint of any format and layout, as one of another.

IN: a ckpt_<step> directory of this project, a Hugging Face directory, a ckpt_<step>.pt of AWS's tutorial or NVIDIA's
script, a directory of neuronx-distributed; or s3:// or https:// of one file. `--inspect IN` says what it is.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from common.disk_space import require_disk_space
from common.errors import UserError
from common.files import TEMPORARY_SUFFIX, disk_errors, rename_durably
from common.hashing import InputHashes
from common.secrets import revealed_by_parent
from stages.checkpoints.source import (
    add_source_options,
    brought,
    local_source,
    model_config,
    opened,
    source_identity,
    written,
)
from stages.directory.command import run
from stages.directory.manifest import Identity, Output, StageDirectory
from stages.transfer.shard_import import PATTERNS
from stages.transfer.urls import add_transport_options, transport_of

#: Format → the directory in OUT that it becomes; a .pt is in OUT itself, where the script looks for it.
RESULT = {"native": "checkpoint", "hf": "model"}
FORMAT_VERSION = 1


def convert(work: StageDirectory, args: argparse.Namespace) -> dict[str, Any]:
    """Write the checkpoint `args.source` in the format `args.to`; returns the counts."""
    from trainer.checkpoint.interop.pt_file import ScriptSettings
    from trainer.checkpoint.interop.write import WriteOptions, bytes_needed
    from trainer.parallel.plan import require_divisible

    options = WriteOptions(
        step=args.step,
        with_optimizer=not args.no_optimizer,
        tensor_parallel_size=args.tensor_parallel_size,
        training=ScriptSettings(args.lr, args.warmup_steps, args.max_steps, args.weight_decay, args.data_dir),
    )
    with (
        brought(args.source, work, transport_of(args)) as path,
        opened(path, model_config(args.config), optimizer=options.with_optimizer) as source,
    ):
        require_divisible(source.config, args.tensor_parallel_size)
        require_disk_space(work.path, bytes_needed(source, options), "the checkpoint needs")
        if args.to not in RESULT:
            outputs, counts = written(work, source, work.path, args.to, options)
        else:
            target = work.path / RESULT[args.to]
            temporary = target.with_name(target.name + TEMPORARY_SUFFIX)
            with disk_errors(temporary):
                temporary.mkdir()
            found, counts = written(work, source, temporary, args.to, options)
            if args.to == "hf":
                from trainer.checkpoint.interop.write import meets_hugging_face

                meets_hugging_face(temporary)
            rename_durably(temporary, target)
            outputs = [Output(f"{target.name}/{output.path}", output.bytes, output.sha256) for output in found]
    work.finish(outputs, counts)
    return counts


def identity(args: argparse.Namespace) -> Identity:
    parameters: dict[str, Any] = {
        "to": args.to,
        "tensor_parallel_size": args.tensor_parallel_size,
        "with_optimizer": not args.no_optimizer,
        "step": args.step,
    }
    if args.to == "pt":
        script = ("lr", "warmup_steps", "max_steps", "weight_decay")
        parameters |= {name: str(getattr(args, name)) for name in script}
        # Of the shards their paths are written, in this order.
        shards = args.data_dir.glob(PATTERNS["training"]) if args.data_dir else ()
        parameters["files"] = sorted(map(str, shards))
    config = model_config(args.config)
    parameters["model"] = None if config is None else dataclasses.asdict(config)
    inputs = {"checkpoint": source_identity(args.source, InputHashes.beside(args.out))}
    return Identity("convert_checkpoint", FORMAT_VERSION, parameters=parameters, inputs=inputs)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m stages.convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("source", type=revealed_by_parent, metavar="IN", help="the checkpoint")
    p.add_argument(
        "out", type=Path, nargs="?", metavar="OUT",
        help="stage directory to fill: OUT/checkpoint (native), OUT/model (hf) or OUT/ckpt_<step>.pt (pt)",
    )  # fmt: skip
    p.add_argument("--inspect", action="store_true", help="say what IN is, from its headers, and write nothing")
    p.add_argument("--to", choices=("native", "hf", "pt"), default="native", help="format to write (native)")
    p.add_argument("--tensor-parallel-size", type=int, default=1, metavar="T", help="native: files for T ranks (1)")
    p.add_argument("--no-optimizer", action="store_true", help="leave the optimizer's state out")
    add_source_options(p)
    add_transport_options(p.add_argument_group("IN at s3:// or https://"))
    script = p.add_argument_group("--to pt", "what the script goes on with where IN does not say it; its own defaults")
    script.add_argument("--lr", type=float, default=4e-4, help="peak learning rate (4e-4)")
    script.add_argument("--warmup-steps", type=int, default=2000, help="(2000)")
    script.add_argument("--max-steps", type=int, default=28125, help="(28125)")
    script.add_argument("--weight-decay", type=float, default=0.01, help="(0.01)")
    script.add_argument("--data-dir", type=Path, help="the script's shards, to resume its phase 1 with")
    return p


def main() -> None:
    p = parser()
    args = p.parse_args()
    if args.inspect:
        from stages.checkpoints.inspection import inspect

        print(inspect(local_source(args.source)))
        return
    if args.out is None:
        p.error("OUT is missing: where to write to")
    if args.tensor_parallel_size < 1 or (args.tensor_parallel_size > 1 and args.to != "native"):
        raise UserError(
            f"--tensor-parallel-size {args.tensor_parallel_size} with --to {args.to} is not allowed; allowed: 1 or "
            f"more with --to native, 1 with the others"
        )
    with StageDirectory.begin(args.out, lambda: identity(args)) as work:
        counts = convert(work, args)
    print(f"step {counts['global_step']}, {counts['parameters']:,} parameters: {args.out / RESULT.get(args.to, '')}")


if __name__ == "__main__":
    run(main)
