"""`python -m stages.evaluate MODEL DATA --out DIR`: how well a model fills masks and orders sentences it never saw."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.errors import CheckpointError, UserError
from common.files import write_json
from common.hashing import InputHashes
from stages.directory.command import run
from stages.directory.manifest import Identity, Output, StageDirectory
from trainer.checkpoint.format import read_tensors
from trainer.config import DEVICES, ModelConfig
from trainer.data.bert_batch import IGNORED
from trainer.data.order import Samples, shuffled
from trainer.data.reader import BatchReader
from trainer.data.shards import ShardSet
from trainer.devices.base import Device
from trainer.devices.select import select_alone
from trainer.models.bert import BertForPreTraining
from trainer.parallel.sums import at_least_fp32

PATTERN = "*_test_*.hdf5"


def evaluate(
    work: StageDirectory,
    model: BertForPreTraining,
    shards: ShardSet,
    *,
    device: Device,
    batch_size: int,
    max_samples: int,
) -> dict[str, Any]:
    """Measure `model` on up to `max_samples` rows of `shards`; losses are means in nats, accuracies shares of 1."""
    samples = all_samples(shards)[shuffled(shards.rows, 0)[:max_samples]]  # a limit takes a fair share of all documents
    reader = BatchReader(shards, vocab_size=model.config.vocab_size, static_shapes=device.compiles_steps)
    sums = np.zeros(4)
    masked = sequences = 0
    model.to(device.torch_device).eval()
    with work.progress("evaluate", len(samples), "sequences") as bar, torch.no_grad():
        for start in range(0, len(samples), batch_size):
            (batch,), (counts,) = reader.micro_batches(samples[np.s_[start : start + batch_size]], batch_size)
            batch = device.put(batch)
            words, pairs = (at_least_fp32(logits) for logits in model.logits(batch))
            losses = (
                torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
                for logits, labels in ((words, batch.masked_labels), (pairs, batch.next_sentence_labels))
            )
            right = (
                (words.argmax(-1) == batch.masked_labels).sum(),
                (pairs.argmax(-1) == batch.next_sentence_labels).sum(),
            )
            # One transfer: on a lazy device each value fetched alone is a graph of its own, forward pass included.
            sums += torch.stack([value.float() for value in (*losses, *right)]).tolist()
            masked += counts[0]
            sequences += counts[1]
            bar.update(len(batch.input_ids))
    return {
        "samples": sequences,
        "masked_tokens": masked,
        "masked_lm_loss": sums[0] / masked,
        "next_sentence_loss": sums[1] / sequences,
        "masked_lm_accuracy": sums[2] / masked,
        "next_sentence_accuracy": sums[3] / sequences,
    }


def all_samples(shards: ShardSet) -> Samples:
    """Every row of a data set, in order."""
    counts = shards.rows_per_shard
    rows = [np.arange(count) for count in counts]
    return Samples(np.repeat(np.arange(len(counts)), counts), np.concatenate(rows))


def load_model(directory: Path, device: Device) -> BertForPreTraining:
    """The model, for `device`, of a Hugging Face directory with one model.safetensors. Raises `UserError`."""
    try:
        config = ModelConfig.of_hugging_face(json.loads((directory / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{directory} is not a Hugging Face model: {error}; give a directory with config.json"
        ) from error
    model = BertForPreTraining(config, device.operations)
    # Hugging Face may store tied tensors under their second names too.
    tensors = {
        name: tensor
        for name, tensor in read_tensors(directory / "model.safetensors")
        if not name.startswith("cls.predictions.decoder.")
    }
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise CheckpointError(f"{directory} does not hold a whole BertForPreTraining: {error}") from error
    return model


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m stages.evaluate", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    p.add_argument("model", type=Path, metavar="MODEL", help="a Hugging Face directory, as stages.merge leaves it")
    p.add_argument("data", type=Path, metavar="DATA", help=f"a directory with {PATTERN} shards")
    p.add_argument("--out", type=Path, required=True, help="stage directory to fill")
    p.add_argument("--max-pred-len", type=int, default=80, help="masked positions in a row, at most")
    p.add_argument("--max-samples", type=int, default=10_000, help="sequences to measure on, at most")
    p.add_argument("--batch-size", type=int, default=8, help="sequences in one forward pass")
    p.add_argument("--device", choices=DEVICES, default="auto", help="where to compute")
    return p


def identity(args: argparse.Namespace) -> Identity:
    """The content of the model and of the held-out shards, not their paths. Raises `UserError`."""
    hashes = InputHashes.beside(args.out)
    inputs = {
        "model": {name: hashes.sha256(args.model / name) for name in ("config.json", "model.safetensors")},
        "data": {Path(file.path).name: file.sha256 for file in hashes.hash(sorted(args.data.glob(PATTERN)))},
    }
    parameters = {"max_pred_len": args.max_pred_len, "max_samples": args.max_samples}
    return Identity("evaluate", 1, parameters=parameters, inputs=inputs)


def main() -> None:
    args = parser().parse_args()
    if not args.data.is_dir():
        raise UserError(f"there is no directory {args.data}; give one with {PATTERN} shards")
    with StageDirectory.begin(args.out, lambda: identity(args)) as work:
        counts: dict[str, Any] = {"samples": 0}
        device = select_alone(args.device)
        if any(args.data.glob(PATTERN)):
            counts = evaluate(
                work,
                load_model(args.model, device),
                ShardSet.open(args.data, PATTERN, max_pred_len=args.max_pred_len),
                device=device,
                batch_size=args.batch_size,
                max_samples=args.max_samples,
            )
        else:
            print(f"{args.data} has no {PATTERN}: nothing was kept apart, so nothing is measured")
        report = work.path / "evaluation.json"
        write_json(report, counts)
        work.finish([Output.of(work.path, report)], counts)
    print(json.dumps(counts))


if __name__ == "__main__":
    run(main)
