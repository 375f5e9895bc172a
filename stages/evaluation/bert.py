"""BERT's masked-LM and next-sentence loss and accuracy on held-out examples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.errors import CheckpointError, UserError
from stages.directory.manifest import StageDirectory
from trainer.checkpoint.format import read_tensors
from trainer.config import ModelConfig
from trainer.data.bert_batch import IGNORED
from trainer.data.order import Samples, shuffled
from trainer.data.reader import BatchReader
from trainer.data.shards import ShardSet
from trainer.devices.base import Device
from trainer.models.bert import BertForPreTraining
from trainer.parallel.sums import at_least_fp32


def evaluate(
    work: StageDirectory,
    model: BertForPreTraining,
    shards: ShardSet,
    *,
    device: Device,
    batch_size: int,
    max_samples: int,
) -> dict[str, Any]:
    """Evaluate `model` on up to `max_samples` rows of `shards`; losses are means in nats, accuracies in 0 … 1."""
    samples = all_samples(shards)[shuffled(shards.rows, 0)[:max_samples]]  # a limit samples all shards evenly
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
            # One transfer: on a lazy device, each separate fetch compiles a graph of its own, forward pass included.
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
    """All rows of a data set, in order."""
    counts = shards.rows_per_shard
    rows = [np.arange(count) for count in counts]
    return Samples(np.repeat(np.arange(len(counts)), counts), np.concatenate(rows))


def load_model(directory: Path, device: Device) -> BertForPreTraining:
    """Load a Hugging Face directory with a single model.safetensors, for `device`. Raises `UserError`."""
    try:
        config = ModelConfig.of_hugging_face(json.loads((directory / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{directory} is not a Hugging Face model: {error}; give a directory with config.json"
        ) from error
    model = BertForPreTraining(config, device.operations)
    # Hugging Face may also store tied tensors under their second names.
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
