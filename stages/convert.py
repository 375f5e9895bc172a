"""`python -m stages.convert IN OUT --to native|hf|pt`: convert a checkpoint between formats and layouts.

IN: a ckpt_<step> directory of this project, a Hugging Face directory, a ckpt_<step>.pt from AWS's tutorial or NVIDIA's
script, a neuronx-distributed directory; or an s3:// or https:// URL of one file. `--inspect IN` describes it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from common.disk_space import require_disk_space
from common.errors import UserError
from common.files import TEMPORARY_SUFFIX, disk_errors, fresh_directory, rename_durably
from common.hashing import InputHashes
from common.options import fields_of, from_namespace, option
from stages.directory.command import run
from stages.directory.manifest import Identity, Output, StageDirectory
from stages.directory.options import stage_parser
from stages.transfer.checkpoint_source import (
    SourceOptions,
    brought,
    checkpoint_of,
    model_config,
    opened,
    source_identity,
    written,
)
from stages.transfer.urls import Transport
from trainer.config import TrainConfig
from trainer.data.file_names import TRAINING_SHARDS
from trainer.registry import require_warmup

#: Format → its directory in OUT; a .pt is written to OUT itself, where the script looks for it.
RESULT = {"native": "checkpoint", "hf": "model"}
_SCRIPT = "--to pt"


def _of_training(name: str, text: str) -> Any:
    """An option with the default and the limit of the trainer's."""
    field, about = fields_of(TrainConfig)[name]
    return option(field.default, group=_SCRIPT, least=about.least, unit=about.unit, decides=False, help=text)


@dataclass(frozen=True, kw_only=True)
class ConvertOptions(SourceOptions, Transport):
    """The checkpoint to convert, and the format and layout to write."""

    module: ClassVar = "stages.convert"
    stage: ClassVar = "convert_checkpoint"
    out_nargs: ClassVar = "?"
    out_help: ClassVar = "stage directory to fill: OUT/checkpoint (native), OUT/model (hf) or OUT/ckpt_<step>.pt (pt)"

    to: str = option("native", choices=("native", "hf", "pt"), omit_default=True, help="format to write")
    tensor_parallel_size: int = option(
        1, unit="ranks", least=1, omit_default=True, help="native: number of tensor-parallel ranks to write files for"
    )
    optimizer: bool = option(True, decides=False, help="keep the optimizer's state")
    #: The model settings, for when luigi plans the stage before its vocabulary exists.
    model: Mapping[str, Any] | None = option(None, names=None, omit_default=True, help="in place of --config")
    # What the tutorial's script resumes with if IN does not record it; its defaults are the trainer's.
    lr: float = _of_training("lr", "peak learning rate")
    warmup_steps: int = _of_training("warmup_steps", "optimizer steps of warm-up")
    max_steps: int = _of_training("max_steps", "optimizer steps of the phase")
    weight_decay: float = _of_training("weight_decay", "weight decay of all parameters but biases and norms")
    data_dir: Path | None = option(None, group=_SCRIPT, help="the script's shards, for resuming its phase 1")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tensor_parallel_size > 1 and self.to != "native":
            raise UserError(
                f"--tensor-parallel-size {self.tensor_parallel_size} with --to {self.to} is not allowed; allowed: 1 or "
                f"more with --to native, 1 with the others"
            )
        if self.to == "pt":
            require_warmup("linear", warmup_steps=self.warmup_steps, max_steps=self.max_steps, decay_share=1)

    def parameters(self) -> dict[str, Any]:
        parameters = super().parameters()
        if self.to == "pt":
            script = ("lr", "warmup_steps", "max_steps", "weight_decay")
            parameters |= {name: str(getattr(self, name)) for name in script}
            # The .pt file lists the shards' paths, in this order.
            shards = self.data_dir.glob(TRAINING_SHARDS) if self.data_dir else ()
            parameters["files"] = sorted(map(str, shards))
        return parameters

    def identity(self, hashes: InputHashes | None = None, upstream: Mapping[str, str] | None = None) -> Identity:
        """Omit the chain's default, which keeps the optimizer of a stage's checkpoint and drops that of any other."""
        identity = super().identity(hashes, upstream)
        if self.optimizer != ("pretrain" in identity.upstream):
            identity.parameters["with_optimizer"] = self.optimizer
        return identity

    def inputs(self, hashes: InputHashes, upstream: Mapping[str, str]) -> dict[str, Any]:
        return {} if "pretrain" in upstream else {"start_from": source_identity(self.source, hashes)}


def convert(work: StageDirectory, args: ConvertOptions) -> dict[str, Any]:
    """Convert the checkpoint `args.source` to the format `args.to`; returns the counts."""
    from trainer.checkpoint.interop.pt_file import ScriptSettings
    from trainer.checkpoint.interop.write import WriteOptions, bytes_needed

    options = WriteOptions(
        step=args.step,
        with_optimizer=args.optimizer,
        tensor_parallel_size=args.tensor_parallel_size,
        training=ScriptSettings(args.lr, args.warmup_steps, args.max_steps, args.weight_decay, args.data_dir),
    )
    with (
        brought(args.source, work, args) as path,
        opened(path, model_config(args.config), optimizer=options.with_optimizer) as source,
    ):
        source.config.require_divisible(args.tensor_parallel_size)
        require_disk_space(work.path, bytes_needed(source, options), "the checkpoint needs")
        if args.to not in RESULT:
            outputs, counts = written(work, source, work.path, args.to, options)
        else:
            target = work.path / RESULT[args.to]
            temporary = target.with_name(target.name + TEMPORARY_SUFFIX)
            with disk_errors(temporary):
                fresh_directory(temporary)
            found, counts = written(work, source, temporary, args.to, options)
            rename_durably(temporary, target)
            outputs = [Output(f"{target.name}/{output.path}", output.bytes, output.sha256) for output in found]
    work.finish(outputs, counts)
    return counts


def parser() -> argparse.ArgumentParser:
    p = stage_parser(ConvertOptions, __doc__)
    p.add_argument("--inspect", action="store_true", help="describe IN from its headers and write nothing")
    return p


def main() -> None:
    p = parser()
    args = p.parse_args()
    options = from_namespace(ConvertOptions, args)
    if args.inspect:
        from trainer.checkpoint.interop.inspection import inspect

        print(inspect(checkpoint_of(options.source)))
        return
    if args.out is None:
        p.error("OUT is missing; say where to write")
    with StageDirectory.begin(args.out, lambda: options.identity(InputHashes.beside(args.out))) as work:
        counts = convert(work, options)
    print(f"step {counts['global_step']}, {counts['parameters']:,} parameters: {args.out / RESULT.get(options.to, '')}")


if __name__ == "__main__":
    run(main)
