"""`python -m stages.merge IN OUT`: merge a checkpoint's tensor-parallel shards into a Hugging Face directory.

IN may be in any format. OUT/model gets config.json, model.safetensors (or shards and their index) and, if given, a
tokenizer.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from common.disk_space import require_disk_space
from common.errors import UserError
from common.files import (
    TEMPORARY_SUFFIX,
    disk_errors,
    durable_file,
    fresh_directory,
    read_json,
    rename_durably,
    write_json,
)
from common.hashing import InputHashes, changed
from common.options import option
from common.size import parse_size
from stages.directory.command import run
from stages.directory.manifest import Output, StageDirectory
from stages.directory.options import fingerprints, parse, stage_parser
from stages.text.corpus import TOKENIZER
from stages.transfer.checkpoint_source import (
    SourceOptions,
    checkpoint_of,
    held_still,
    model_config,
    opened,
    source_identity,
    written,
)
from stages.view.card import CARD

MODEL = "model"
TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER_FILES = ("vocab.txt", "tokenizer.json", TOKENIZER_CONFIG, "special_tokens_map.json")


@dataclass(frozen=True, kw_only=True)
class MergeOptions(SourceOptions):
    """The checkpoint to merge, the tokenizer to add, and how to write the model."""

    module: ClassVar = "stages.merge"
    stage: ClassVar = "merge_shards"
    format_version: ClassVar = 2  # 2: the step is in the weights' file
    out_help: ClassVar = f"stage directory to fill; the result is OUT/{MODEL}"

    tokenizer: Path | None = option(
        None, metavar="DIR", help="stages.tokenize directory, or one with a tokenizer's files, to copy beside the model"
    )
    vocab_file: Path | None = option(
        None, metavar="FILE", help="vocab.txt to build the tokenizer's files from, instead of --tokenizer"
    )
    lower_case: bool = option(True, decides=False, help="--vocab-file belongs to an uncased model")
    dtype: str | None = option(
        None, choices=("bf16", "fp32"), omit_default=True, help="dtype of the written parameters (default: unchanged)"
    )
    with_optimizer: bool = option(
        False, omit_default=True,
        help=f"also write the merged moments to OUT/{MODEL}/optimizer.safetensors (exp_avg.<name>, exp_avg_sq.<name>)",
    )  # fmt: skip
    max_shard_size: str | None = option(
        None, metavar="SIZE", omit_default=True, help="maximum size of a file, such as 2GB (default: one file)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokenizer and self.vocab_file:
            raise UserError("--tokenizer and --vocab-file are both given; give one of them")
        _ = self.max_shard_bytes

    @property
    def max_shard_bytes(self) -> int | None:
        """Raises `UserError`."""
        try:
            return parse_size(self.max_shard_size) if self.max_shard_size else None
        except ValueError as error:
            raise UserError(f"--max-shard-size: {error}") from None

    def parameters(self) -> dict[str, Any]:
        return {**super().parameters(), **({"lower_case": self.lower_case} if self.vocab_file else {})}

    def upstream(self) -> dict[str, str]:
        return {**super().upstream(), **fingerprints(tokenize_corpus=self.tokenizer)}

    def inputs(self, hashes: InputHashes, upstream: Mapping[str, str]) -> dict[str, Any]:
        inputs: dict[str, Any] = {}
        if "pretrain" not in upstream:
            inputs["checkpoint"] = source_identity(self.source, hashes)
        if self.tokenizer and "tokenize_corpus" not in upstream:
            inputs["tokenizer"] = {path.name: hashes.sha256(path) for path in _tokenizer_files(self.tokenizer)}
        if self.vocab_file:
            inputs["vocab_file"] = hashes.sha256(self.vocab_file)
        return inputs


def merge(work: StageDirectory, args: MergeOptions) -> None:
    """Write the model of `args.source` to `model/`, with its tokenizer, and complete `work`. Raises `UserError` for a
    tokenizer that is too large for the model.

    Raises `CheckpointError` if a parameter is missing, unexpected, of the wrong shape, not finite, or differs between
    ranks that must agree on it.
    """
    import torch

    from stages.evaluation.blimp import load_tokenizer
    from stages.tokens.wordpiece import save_tokenizer
    from trainer.checkpoint.interop.write import WriteOptions, bytes_needed

    options = WriteOptions(
        step=args.step,
        with_optimizer=args.with_optimizer,
        dtype={"bf16": torch.bfloat16, "fp32": torch.float32, None: None}[args.dtype],
        max_shard_bytes=args.max_shard_bytes,
    )
    path = checkpoint_of(args.source)
    target, temporary = work.path / MODEL, work.path / (MODEL + TEMPORARY_SUFFIX)
    with (
        held_still(path, work),
        opened(path, model_config(args.config), optimizer=args.with_optimizer) as source,
    ):
        if args.with_optimizer and not source.with_optimizer:
            raise UserError(f"{path} has no optimizer state to keep; leave --with-optimizer out")
        require_disk_space(work.path, bytes_needed(source, options), "the model needs")
        tokenizer = _tokenizer_files(args.tokenizer) if args.tokenizer else []
        if tokenizer:
            load_tokenizer(tokenizer[0].parent, source.config.vocab_size)
        with disk_errors(temporary):
            fresh_directory(temporary)
            for file in tokenizer:
                with durable_file(temporary / file.name) as copy:
                    copy.write(file.read_bytes())
        if args.vocab_file:
            vocabulary = _vocabulary_of(args.vocab_file, source.config.vocab_size, work.identity.inputs["vocab_file"])
            save_tokenizer(temporary, vocabulary, lower_case=args.lower_case)
        _fit_positions(temporary / TOKENIZER_CONFIG, source.config.max_position_embeddings)
        outputs, counts = written(work, source, temporary, "hf", options)
    if (target / CARD).exists():  # a rebuilt model keeps its model card, which people edit
        with disk_errors(temporary):
            shutil.copyfile(target / CARD, temporary / CARD)
    rename_durably(temporary, target)
    named = {f"{MODEL}/{output.path}": output for output in outputs}
    outputs = [dataclasses.replace(output, path=path) for path, output in named.items()]
    copied = (path for path in sorted(target.iterdir()) if f"{MODEL}/{path.name}" not in named and path.name != CARD)
    outputs += [Output.of(work.path, path) for path in copied]
    work.finish(outputs, {**counts, "tokenizer": bool(args.tokenizer or args.vocab_file)})


def _fit_positions(path: Path, positions: int) -> None:
    """Make the tokenizer with this configuration, if there is one, cut texts at as many tokens as the model takes."""
    configuration = read_json(path)
    if configuration is not None and configuration.get("model_max_length") != positions:
        write_json(path, {**configuration, "model_max_length": positions})


def _vocabulary_of(path: Path, size: int, sha256: str) -> list[str]:
    """Read the pieces in `path`. Raises `UserError` if its sha256 is not this one, or there are more pieces than the
    model's `size` entries."""
    from trainer.data.vocabulary import read_vocabulary

    (file,) = InputHashes().hash([path])
    if file.sha256 != sha256:
        raise changed(path)
    pieces = read_vocabulary(path, pads=False)
    file.require_unchanged()
    # A model may have more entries than pieces: sizes are padded to a multiple of 8 or 64.
    if len(pieces) > size:
        raise UserError(
            f"the vocabulary {path} has {len(pieces)} entries and the model {size}; give the one that its shards were "
            f"made with"
        )
    return pieces


def _tokenizer_files(directory: Path) -> list[Path]:
    """The tokenizer's files in `directory`, which may also be a tokenized corpus."""
    where = directory / TOKENIZER if (directory / TOKENIZER).is_dir() else directory
    return [where / name for name in TOKENIZER_FILES if (where / name).exists()]


def parser() -> argparse.ArgumentParser:
    return stage_parser(MergeOptions, __doc__)


def main() -> None:
    options, out = parse(MergeOptions, parser())
    if options.tokenizer and not any(path.name == "tokenizer.json" for path in _tokenizer_files(options.tokenizer)):
        raise UserError(f"--tokenizer {options.tokenizer} holds no tokenizer.json; give a tokenizer's directory")
    if options.vocab_file:
        from trainer.data.vocabulary import read_vocabulary

        read_vocabulary(options.vocab_file, pads=False)
    with StageDirectory.begin(out, lambda: options.identity(InputHashes.beside(out))) as work:
        merge(work, options)
    print(f"model: {out / MODEL}")


if __name__ == "__main__":
    run(main)
