"""Evaluate the accuracy of a saved MLP on held-out images."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from common.files import sha256_of, write_json
from common.hashing import InputHashes
from common.options import option
from stages.directory.command import run
from stages.directory.manifest import Output, StageDirectory
from stages.directory.options import StageOptions, fingerprints, parse, stage_parser
from stages.transfer.checkpoint_source import checkpoint_in
from trainer.config import DEVICES


@dataclass(frozen=True, kw_only=True)
class EvaluateMlpOptions(StageOptions):
    """The checkpoint and the images to evaluate it on."""

    module: ClassVar = "stages.evaluate_mlp"
    stage: ClassVar = "evaluate_mlp"

    checkpoint: Path = option(
        names=("checkpoint",),
        metavar="CHECKPOINT",
        help="a ckpt_<step> directory of --workload mnist, or the directory of the stage train_mlp",
    )
    data: Path = option(names=("data",), metavar="DATA", help="a directory of stages.mnist, or one with MNIST's files")
    batch_size: int = option(32, unit="images", least=1, decides=False, help="images per forward pass")
    device: str = option("auto", choices=DEVICES, decides=False, help="device to compute on")

    def upstream(self) -> dict[str, str]:
        return fingerprints(train_mlp=self.checkpoint, download_mnist=self.data)

    def inputs(self, hashes: InputHashes, upstream: Mapping[str, str]) -> dict[str, Any]:
        from trainer.checkpoint.directory import MANIFEST
        from trainer.workloads.mnist import HELD_OUT, Images

        inputs: dict[str, Any] = {}
        if "train_mlp" not in upstream:
            inputs["checkpoint"] = sha256_of(self.checkpoint / MANIFEST)
        if "download_mnist" not in upstream:
            inputs["data"] = Images(self.data, HELD_OUT).identity
        return inputs


def evaluate_model(work: StageDirectory, checkpoint: Path, options: EvaluateMlpOptions) -> None:
    """Evaluate the model, write `evaluation.json` and complete `work`. Raises `UserError`."""
    from stages.evaluation.mlp import evaluate, load_model
    from trainer.devices.select import select_alone
    from trainer.workloads.mnist import HELD_OUT, Images

    images, device = Images(options.data, HELD_OUT), select_alone(options.device)
    model = load_model(checkpoint)
    print("----------Evaluating---------------")
    counts = evaluate(work, model, images, device=device, batch_size=options.batch_size)
    print(f"Test throughput (iter/sec): {counts['iterations_per_s']}")
    print(f"Accuracy: {counts['accuracy']}")
    print("----------Done Evaluating---------------")
    report = work.path / "evaluation.json"
    write_json(report, counts)
    work.finish([Output.of(work.path, report)], counts)


def parser() -> argparse.ArgumentParser:
    return stage_parser(EvaluateMlpOptions, __doc__)


def main() -> None:
    options, out = parse(EvaluateMlpOptions, parser())
    from trainer.checkpoint.manager import require_valid

    checkpoint = checkpoint_in(options.checkpoint)
    require_valid(checkpoint)
    with StageDirectory.begin(out, lambda: options.identity(InputHashes.beside(out))) as work:
        evaluate_model(work, checkpoint, options)


if __name__ == "__main__":
    run(main)
