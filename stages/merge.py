"""`python -m stages.merge IN OUT`: a checkpoint, its tensor-parallel shards joined, as a Hugging Face directory."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from torch import Tensor

from stages.command import run
from stages.convert import read_snapshot
from stages.manifest import Identity, Output, StageDirectory
from trainer.checkpoint.format import MANIFEST, write_tensors
from trainer.checkpoint.manager import require_valid
from trainer.config import ModelConfig
from trainer.errors import CheckpointError, UserError
from trainer.files import TEMPORARY_SUFFIX, disk_errors, rename_durably, sha256_of, write_json
from trainer.models.bert import BertForPreTraining

MODEL = "model"
TOKENIZER_FILES = ("vocab.txt", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def merge(work: StageDirectory, source: Path, *, tokenizer: Path | None) -> None:
    """Write config.json, model.safetensors and, where given, the files of `tokenizer` to `model/`.

    Raises `CheckpointError` if a parameter is missing, too much, of another shape, or not finite.
    """
    snapshot = read_snapshot(source)
    config = ModelConfig(**snapshot.state.model)
    check(snapshot.model, config, source)
    target, temporary = work.path / MODEL, work.path / (MODEL + TEMPORARY_SUFFIX)
    with disk_errors(temporary):
        temporary.mkdir()
        for name in TOKENIZER_FILES if tokenizer else ():
            assert tokenizer is not None
            if (tokenizer / name).exists():
                shutil.copyfile(tokenizer / name, temporary / name)
    write_json(temporary / "config.json", config.to_hugging_face())
    write_tensors(temporary / "model.safetensors", snapshot.model, {"format": "pt"})
    rename_durably(temporary, target)
    counts = {
        "global_step": snapshot.state.global_step,
        "parameters": sum(tensor.numel() for tensor in snapshot.model.values()),
        "tokenizer": tokenizer is not None,
    }
    work.finish([Output.of(work.path, path) for path in sorted(target.iterdir())], counts)


def check(tensors: dict[str, Tensor], config: ModelConfig, source: Path) -> None:
    """Raise `CheckpointError` unless `tensors` are all parameters of the model, in their shapes, and finite."""
    with torch.device("meta"):
        expected = {name: p.shape for name, p in BertForPreTraining(config).named_parameters()}
    for name in sorted({*expected, *tensors}):
        if name not in tensors:
            raise CheckpointError(f"{source} lacks {name}; merge another checkpoint")
        if name not in expected:
            raise CheckpointError(f"{source} holds {name}, which its model does not have; merge another checkpoint")
        if tensors[name].shape != expected[name]:
            raise CheckpointError(
                f"{source}: {name} has shape {tuple(tensors[name].shape)}, its model {tuple(expected[name])}"
            )
        if not torch.isfinite(tensors[name]).all():
            raise CheckpointError(f"{source}: {name} holds values that are not finite; merge an earlier checkpoint")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m stages.merge", description=__doc__)
    p.add_argument("source", type=Path, metavar="IN", help="a checkpoint directory, ckpt_<step>")
    p.add_argument("out", type=Path, metavar="OUT", help=f"stage directory to fill; the result is OUT/{MODEL}")
    p.add_argument("--tokenizer", type=Path, help="directory with the tokenizer's files, to lay beside the model")
    return p


def main() -> None:
    args = parser().parse_args()
    require_valid(args.source)
    if args.tokenizer and not (args.tokenizer / "tokenizer.json").exists():
        raise UserError(f"--tokenizer {args.tokenizer} holds no tokenizer.json; give a tokenizer's directory")
    inputs = {"checkpoint": sha256_of(args.source / MANIFEST)}
    if args.tokenizer:
        inputs["tokenizer"] = sha256_of(args.tokenizer / "tokenizer.json")
    with StageDirectory.begin(args.out, lambda: Identity("merge_shards", 1, inputs=inputs)) as work:
        merge(work, args.source, tokenizer=args.tokenizer)
    print(f"model: {args.out / MODEL}")


if __name__ == "__main__":
    run(main)
