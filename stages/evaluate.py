"""Evaluate a model's masked-LM and next-sentence predictions on held-out examples."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from common.errors import UserError
from common.files import write_json
from common.hashing import InputHashes
from common.options import option
from stages.directory.command import run
from stages.directory.manifest import Output, StageDirectory
from stages.directory.options import StageOptions, fingerprints, parse, stage_parser
from stages.merge import MODEL, TOKENIZER_FILES
from trainer.config import DEVICES

#: Held-out shards, and those of training, whose word frequencies are counted.
PATTERN, TRAINING_PATTERN = "*_test_*.hdf5", "*_training_*.hdf5"


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(StageOptions):
    """The model and the examples to evaluate it on."""

    module: ClassVar = "stages.evaluate"
    stage: ClassVar = "evaluate"
    format_version: ClassVar = 2  # 2: the unigram baseline, bits per character, accuracy by frequency

    model: Path = option(
        names=("model",), metavar="MODEL", help="a Hugging Face directory, or the directory of stages.merge"
    )
    data: Path = option(names=("data",), metavar="DATA", help=f"a directory with {PATTERN} shards")
    max_pred_len: int = option(80, unit="positions", least=1, help="maximum masked positions in a row")
    max_samples: int = option(10_000, unit="sequences", least=1, help="maximum sequences to evaluate on")
    batch_size: int = option(8, unit="sequences", least=1, decides=False, help="sequences per forward pass")
    device: str = option("auto", choices=DEVICES, decides=False, help="device to compute on")

    def upstream(self) -> dict[str, str]:
        return fingerprints(merge_shards=self.model, dataset=self.data)

    def inputs(self, hashes: InputHashes, upstream: Mapping[str, str]) -> dict[str, Any]:
        inputs: dict[str, Any] = {}
        if "merge_shards" not in upstream:
            inputs["model"] = {name: hashes.sha256(self.model / name) for name in ("config.json", "model.safetensors")}
        if "dataset" not in upstream:
            from stages.evaluation.frequencies import counted_shards

            training = counted_shards(sorted(path.name for path in self.data.glob(TRAINING_PATTERN)))
            read = [*sorted(self.data.glob(PATTERN)), *(self.data / name for name in training)]
            inputs["data"] = {Path(shard.path).name: shard.sha256 for shard in hashes.hash(read)}
        if len(upstream) < 2 and self.vocabulary is not None:
            inputs["vocabulary"] = hashes.sha256(self.vocabulary)
        return inputs

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
    """Evaluate the model, write `evaluation.json` and complete `work`; returns the counts. Raises `UserError`."""
    counts: dict[str, Any] = {"samples": 0}
    if any(options.data.glob(PATTERN)):
        from stages.evaluation.bert import evaluate, load_model
        from trainer.data.shards import ShardSet
        from trainer.data.vocabulary import read_vocabulary
        from trainer.devices.select import select_alone

        device = select_alone(options.device)
        has_training = any(options.data.glob(TRAINING_PATTERN))
        counts = evaluate(
            work,
            load_model(options.model_directory, device),
            ShardSet.open(options.data, PATTERN, max_pred_len=options.max_pred_len),
            training=ShardSet.open(options.data, TRAINING_PATTERN) if has_training else None,
            pieces=read_vocabulary(options.vocabulary) if options.vocabulary else None,
            device=device,
            batch_size=options.batch_size,
            max_samples=options.max_samples,
        )
    else:
        print(f"{options.data} has no {PATTERN}: nothing was held out, so nothing is measured")
    report = work.path / "evaluation.json"
    write_json(report, counts)
    work.finish([Output.of(work.path, report)], counts)
    return counts


def parser() -> argparse.ArgumentParser:
    return stage_parser(EvaluateOptions, __doc__)


def main() -> None:
    options, out = parse(EvaluateOptions, parser())
    if not options.data.is_dir():
        raise UserError(f"there is no directory {options.data}; give one with {PATTERN} shards")
    with StageDirectory.begin(out, lambda: options.identity(InputHashes.beside(out))) as work:
        counts = evaluate_model(work, options)
    print(json.dumps(counts))


if __name__ == "__main__":
    run(main)
