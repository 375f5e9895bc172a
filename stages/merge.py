"""`python -m stages.merge IN OUT`: a checkpoint of any format, its tensor-parallel shards joined, as a Hugging Face
directory: OUT/model with config.json, model.safetensors (or shards and their index) and, where given, a tokenizer.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
from pathlib import Path
from typing import Any

from common.disk_space import require_disk_space
from common.errors import UserError
from common.files import TEMPORARY_SUFFIX, disk_errors, rename_durably
from common.hashing import InputHashes
from common.secrets import revealed_by_parent
from stages.checkpoints.source import (
    add_source_options,
    held_still,
    local_source,
    model_config,
    opened,
    size_in_bytes,
    source_identity,
    written,
)
from stages.directory.command import run
from stages.directory.manifest import Identity, Output, StageDirectory
from stages.tokens.wordpiece import read_vocabulary, save_tokenizer
from stages.view.card import CARD

MODEL = "model"
FORMAT_VERSION = 2
TOKENIZER_FILES = ("vocab.txt", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def merge(work: StageDirectory, args: argparse.Namespace) -> None:
    """Write the model of `args.source` to `model/`, load it once with Hugging Face, and finish.

    Raises `CheckpointError` if a parameter is missing, too much, of another shape, differs between ranks that must
    agree on it, or is not finite.
    """
    import torch

    from trainer.checkpoint.interop.write import WriteOptions, bytes_needed, meets_hugging_face

    options = WriteOptions(
        step=args.step,
        with_optimizer=args.with_optimizer,
        dtype={"bf16": torch.bfloat16, "fp32": torch.float32, None: None}[args.dtype],
        max_shard_bytes=size_in_bytes(args.max_shard_size) if args.max_shard_size else None,
    )
    path = local_source(args.source)
    target, temporary = work.path / MODEL, work.path / (MODEL + TEMPORARY_SUFFIX)
    with (
        held_still(path, work),
        opened(path, model_config(args.config), optimizer=args.with_optimizer) as source,
    ):
        if args.with_optimizer and not source.with_optimizer:
            raise UserError(f"{path} has no optimizer state to keep; leave --with-optimizer out")
        require_disk_space(work.path, bytes_needed(source, options), "the model needs")
        with disk_errors(temporary):
            temporary.mkdir()
            for file in _tokenizer_files(args.tokenizer) if args.tokenizer else ():
                shutil.copyfile(file, temporary / file.name)
        if args.vocab_file:
            vocabulary = _vocabulary_of(args.vocab_file, source.config.vocab_size)
            save_tokenizer(temporary, vocabulary, lower_case=args.lower_case)
        outputs, counts = written(work, source, temporary, "hf", options)
    meets_hugging_face(temporary)
    if (target / CARD).exists():  # made anew, the model keeps the card that was laid beside it
        shutil.copyfile(target / CARD, temporary / CARD)
    rename_durably(temporary, target)
    named = {f"{MODEL}/{output.path}": output for output in outputs}
    outputs = [dataclasses.replace(output, path=path) for path, output in named.items()]
    copied = (path for path in sorted(target.iterdir()) if f"{MODEL}/{path.name}" not in named and path.name != CARD)
    outputs += [Output.of(work.path, path) for path in copied]
    work.finish(outputs, {**counts, "tokenizer": bool(args.tokenizer or args.vocab_file)})


def _vocabulary_of(path: Path, size: int) -> list[str]:
    """The pieces in `path`, which a model of `size` entries can know. Raises `UserError`."""
    pieces = read_vocabulary(path)
    # Models may have more entries, to fill up a multiple of 8 or 64.
    if len(pieces) > size:
        raise UserError(
            f"the vocabulary {path} has {len(pieces)} entries and the model {size}; give the one that its shards were "
            f"made with"
        )
    return pieces


def _tokenizer_files(directory: Path) -> list[Path]:
    return [directory / name for name in TOKENIZER_FILES if (directory / name).exists()]


def identity(args: argparse.Namespace) -> Identity:
    config = model_config(args.config)
    parameters: dict[str, Any] = {
        "dtype": args.dtype,
        "with_optimizer": args.with_optimizer,
        "max_shard_size": args.max_shard_size,
        "step": args.step,
        "model": None if config is None else dataclasses.asdict(config),
    }
    hashes = InputHashes.beside(args.out)
    inputs: dict[str, Any] = {"checkpoint": source_identity(args.source, hashes)}
    if args.tokenizer:
        inputs["tokenizer"] = {path.name: hashes.sha256(path) for path in _tokenizer_files(args.tokenizer)}
    if args.vocab_file:
        inputs["vocab_file"] = hashes.sha256(args.vocab_file)
        parameters["lower_case"] = args.lower_case
    return Identity("merge_shards", FORMAT_VERSION, parameters=parameters, inputs=inputs)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m stages.merge", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "source", type=revealed_by_parent, metavar="IN", help="a checkpoint of any format that stages.convert reads"
    )
    p.add_argument("out", type=Path, metavar="OUT", help=f"stage directory to fill; the result is OUT/{MODEL}")
    tokenizer = p.add_mutually_exclusive_group()
    tokenizer.add_argument(
        "--tokenizer", type=Path, help="directory with the tokenizer's files, to lay beside the model"
    )
    tokenizer.add_argument("--vocab-file", type=Path, help="vocab.txt to make the tokenizer's files from instead")
    p.add_argument(
        "--lower-case", action=argparse.BooleanOptionalAction, default=True, help="of --vocab-file: an uncased one"
    )
    p.add_argument("--dtype", choices=("bf16", "fp32"), help="type of the parameters written (default: as they are)")
    p.add_argument(
        "--with-optimizer", action="store_true",
        help=f"keep the moments too, whole: OUT/{MODEL}/optimizer.safetensors, exp_avg.<name> and exp_avg_sq.<name>",
    )  # fmt: skip
    p.add_argument("--max-shard-size", metavar="SIZE", help="largest file, such as 2GB (default: one file)")
    add_source_options(p)
    return p


def main() -> None:
    args = parser().parse_args()
    if args.tokenizer and not (args.tokenizer / "tokenizer.json").exists():
        raise UserError(f"--tokenizer {args.tokenizer} holds no tokenizer.json; give a tokenizer's directory")
    if args.vocab_file:
        read_vocabulary(args.vocab_file)
    with StageDirectory.begin(args.out, lambda: identity(args)) as work:
        merge(work, args)
    print(f"model: {args.out / MODEL}")


if __name__ == "__main__":
    run(main)
