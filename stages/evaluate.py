"""Evaluate a model's masked-LM predictions on held-out examples, its next-sentence ones if it has that head and the
examples have labels, and its grammar on BLiMP."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from common.errors import UserError
from common.files import write_json
from common.hashing import InputHashes, changed
from common.options import option
from stages.directory.command import run
from stages.directory.manifest import Output, StageDirectory
from stages.directory.options import StageOptions, fingerprints, parse, stage_parser
from stages.evaluation import BLIMP_SETS
from stages.merge import MODEL, TOKENIZER_FILES
from trainer.config import DEVICES
from trainer.data.file_names import HELD_OUT_SHARDS, TRAINING_SHARDS

if TYPE_CHECKING:
    from stages.evaluation.blimp import Blimp
    from trainer.devices.base import Device
    from trainer.models.bert import BertForPreTraining


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(StageOptions):
    """The model and the examples to evaluate it on."""

    module: ClassVar = "stages.evaluate"
    stage: ClassVar = "evaluate"
    format_version: ClassVar = 2  # 2: the unigram baseline, bits per character, accuracy by frequency

    model: Path = option(
        names=("model",), metavar="MODEL", help="a Hugging Face directory, or the directory of stages.merge"
    )
    data: Path = option(names=("data",), metavar="DATA", help=f"a directory with {HELD_OUT_SHARDS} shards")
    held_out: Path | None = option(
        None, metavar="DIR", help=f"use the {HELD_OUT_SHARDS} shards of DIR instead of DATA's"
    )
    max_pred_len: int = option(80, unit="positions", least=1, help="maximum masked positions in a row")
    blimp: Path | None = option(
        None,
        metavar="PATH",
        help="a copy of BLiMP, its archive or the folder of its *.jsonl, to score by pseudo-log-likelihood",
    )
    blimp_samples: int = option(
        0, unit="pairs", least=0, help="only the first pairs of each set of BLiMP; 0: all", omit_default=True
    )
    max_samples: int = option(10_000, unit="sequences", least=1, help="maximum sequences to evaluate on")
    batch_size: int = option(8, unit="sequences", least=1, decides=False, help="sequences per forward pass")
    device: str = option("auto", choices=DEVICES, decides=False, help="device to compute on")

    def upstream(self) -> dict[str, str]:
        return fingerprints(merge_shards=self.model, dataset=self.data)

    def parameters(self) -> dict[str, Any]:
        found = super().parameters()
        return found if self.blimp else {name: value for name, value in found.items() if name != "blimp_samples"}

    def inputs(self, hashes: InputHashes, upstream: Mapping[str, str]) -> dict[str, Any]:
        inputs: dict[str, Any] = {}
        if "merge_shards" not in upstream:
            weights = sorted(self.model.glob("model*.safetensors*")) or sorted(self.model.glob("pytorch_model*.bin*"))
            names = ["config.json", *([path.name for path in weights] or ["model.safetensors"])]
            names += ["tokenizer.json"] if (self.model / "tokenizer.json").exists() else []
            inputs["model"] = {name: hashes.sha256(self.model / name) for name in names}
        if "dataset" not in upstream:
            from stages.examples.sampled_rows import sampled_shards

            training = sampled_shards(sorted(path.name for path in self.data.glob(TRAINING_SHARDS)))
            read = [*sorted(self.data.glob(HELD_OUT_SHARDS)), *(self.data / name for name in training)]
            inputs["data"] = {Path(shard.path).name: shard.sha256 for shard in hashes.hash(read)}
        if self.held_out is not None:
            shards = hashes.hash(sorted(self.held_out.glob(HELD_OUT_SHARDS)))
            inputs["held_out"] = {Path(shard.path).name: shard.sha256 for shard in shards}
        if len(upstream) < 2 and self.vocabulary is not None:
            inputs["vocabulary"] = hashes.sha256(self.vocabulary)
        if self.blimp is not None:
            if self.blimp.is_dir():
                inputs["blimp"] = {path.name: hashes.sha256(path) for path in sorted(self.blimp.glob(BLIMP_SETS))}
            else:
                inputs["blimp"] = hashes.sha256(self.blimp)
        return inputs

    @property
    def held_out_directory(self) -> Path:
        """The directory with the held-out shards."""
        return self.held_out or self.data

    @property
    def model_directory(self) -> Path:
        """The Hugging Face directory."""
        return self.model / MODEL if fingerprints(merge_shards=self.model) else self.model

    @property
    def vocabulary(self) -> Path | None:
        """The vocab.txt beside the model or else the data; None if neither has one."""
        beside = (directory / TOKENIZER_FILES[0] for directory in (self.model_directory, self.data))
        return next((path for path in beside if path.exists()), None)


def evaluate_model(work: StageDirectory, options: EvaluateOptions) -> dict[str, Any]:
    """Evaluate the model, write `evaluation.json` and complete `work`; returns the counts. Raises `UserError`, also if
    an input differs from the one that `work` was claimed with."""
    counts: dict[str, Any] = {"samples": 0}
    has_held_out = any(options.held_out_directory.glob(HELD_OUT_SHARDS))
    if not has_held_out:
        if not (options.blimp or any(options.held_out_directory.glob(TRAINING_SHARDS))):
            raise UserError(
                f"{options.held_out_directory} has no shards, neither {HELD_OUT_SHARDS} nor {TRAINING_SHARDS}; name "
                f"the folder that stages.shard has filled"
            )
        print(f"{options.held_out_directory} has no {HELD_OUT_SHARDS}: nothing was held out to measure a loss on")
    if has_held_out or options.blimp:
        from stages.evaluation.bert import load_model
        from trainer.devices.select import select_alone

        device = select_alone(options.device)
        with _held_still(work, options):
            model = load_model(options.model_directory, device)
            blimp = _blimp(options, model) if options.blimp else None  # bad input is reported before computing
            if has_held_out:
                counts |= _held_out(work, options, model, device)
            if blimp is not None:
                counts |= blimp.scores(work, model, device)
    report = work.path / "evaluation.json"
    write_json(report, counts)
    work.finish([Output.of(work.path, report)], counts)
    return counts


@contextlib.contextmanager
def _held_still(work: StageDirectory, options: EvaluateOptions) -> Iterator[None]:
    """Raise `UserError` if an input file, before or after the block, differs from the one that `work` was claimed with:
    under luigi, that may have been days ago."""
    hashes, claimed = InputHashes.beside(work.path), work.identity

    def require_unchanged() -> None:
        found = options.inputs(hashes, claimed.upstream)
        for name, identity in claimed.inputs.items():
            if found.get(name) != identity:
                raise changed(getattr(options, name) or name)

    require_unchanged()
    yield
    require_unchanged()


def _held_out(
    work: StageDirectory, options: EvaluateOptions, model: BertForPreTraining, device: Device
) -> dict[str, Any]:
    from stages.evaluation.bert import evaluate
    from trainer.data.shards import ShardSet
    from trainer.data.vocabulary import read_vocabulary

    has_training = any(options.data.glob(TRAINING_SHARDS))
    return evaluate(
        work,
        model,
        ShardSet.open(options.held_out_directory, HELD_OUT_SHARDS, max_pred_len=options.max_pred_len),
        training=ShardSet.open(options.data, TRAINING_SHARDS) if has_training else None,
        tokenizer=_tokenizer(options, model),
        pieces=read_vocabulary(options.vocabulary, pads=False) if options.vocabulary else None,
        device=device,
        batch_size=options.batch_size,
        max_samples=options.max_samples,
    )


def _tokenizer(options: EvaluateOptions, model: BertForPreTraining) -> Any:
    """The tokenizer beside the model; None if there is none or it cannot be used."""
    from stages.evaluation.blimp import load_tokenizer

    try:
        return load_tokenizer(options.model_directory, model.config.vocab_size)
    except UserError as error:
        print(f"no prompts are suggested: {error}")
        return None


def _blimp(options: EvaluateOptions, model: BertForPreTraining) -> Blimp:
    from stages.evaluation.blimp import Blimp, load_tokenizer, read_pairs

    assert options.blimp is not None
    pairs = read_pairs(options.blimp, options.blimp_samples)
    return Blimp(pairs, load_tokenizer(options.model_directory, model.config.vocab_size))


def held_out_line(counts: Mapping[str, Any]) -> str:
    """The evaluation in one line, from its counts."""
    if not counts["samples"]:
        return "held out: the data set has no *_test_* shards, so no loss was measured"
    gain = counts["unigram_loss"] - counts["masked_lm_loss"]
    than = f"{abs(gain):.2f} nats {'below' if gain > 0 else 'above'} always guessing by frequency"
    pairs = ""
    if "next_sentence_accuracy" in counts:
        pairs = f"; next-sentence accuracy {counts['next_sentence_accuracy']:.1%}"
    return (
        f"held out ({counts['samples']} sequences): masked-LM accuracy {counts['masked_lm_accuracy']:.1%}, "
        f"loss {counts['masked_lm_loss']:.3f} ({than}: {counts['unigram_loss']:.2f}, "
        f"{counts['unigram_accuracy']:.1%}){pairs}"
    )


def blimp_line(counts: Mapping[str, Any]) -> str | None:
    """BLiMP's result in one line; None without one."""
    if "blimp_accuracy" not in counts:
        return None
    return f"BLiMP: {counts['blimp_accuracy']:.1%} of {counts['blimp_pairs']:,} pairs (chance: 50%)"


def parser() -> argparse.ArgumentParser:
    return stage_parser(EvaluateOptions, __doc__)


def main() -> None:
    options, out = parse(EvaluateOptions, parser())
    if not options.data.is_dir():
        raise UserError(f"there is no directory {options.data}; give one with {HELD_OUT_SHARDS} shards")
    with StageDirectory.begin(out, lambda: options.identity(InputHashes.beside(out))) as work:
        counts = evaluate_model(work, options)
    for line in filter(None, (held_out_line(counts), blimp_line(counts))):
        print(line)


if __name__ == "__main__":
    run(main)
