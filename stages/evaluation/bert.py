"""BERT's masked-LM loss and accuracy, and its next-sentence ones if it has that head, on held-out examples."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.errors import UserError
from stages.directory.manifest import StageDirectory
from stages.evaluation.frequencies import characters, count_pieces, frequency_scores
from stages.evaluation.prompts import suggest
from trainer.checkpoint.interop import open_checkpoint
from trainer.checkpoint.interop.contents import MODEL
from trainer.checkpoint.interop.join import Checkpoint
from trainer.data.bert_batch import IGNORED
from trainer.data.file_names import HELD_OUT_SHARDS
from trainer.data.order import Samples, shuffled
from trainer.data.reader import BatchReader
from trainer.data.shards import MASKED_KEYS, ShardSet
from trainer.devices.base import Device
from trainer.models.bert import BertForPreTraining
from trainer.parallel.fp32_sums import at_least_fp32
from trainer.workloads.bert import require_fitting


def evaluate(
    work: StageDirectory,
    model: BertForPreTraining,
    shards: ShardSet,
    *,
    training: ShardSet | None = None,
    pieces: list[str] | None = None,
    tokenizer: Any = None,
    device: Device,
    batch_size: int,
    max_samples: int,
) -> dict[str, Any]:
    """Evaluate `model` on up to `max_samples` rows of `shards`; losses are means in nats, accuracies in 0 … 1.
    Next-sentence results are included if both model and shards have what they need. Raises `UserError`.

    `training`: the shards whose word frequencies make the unigram baseline; None: `shards`. `pieces`: the vocabulary;
    None: bits per character are None. `tokenizer`: the model's `tokenizers.Tokenizer`; None: no prompts are suggested.
    """
    _require_usable(shards, model)
    samples = all_samples(shards)[shuffled(shards.rows, 0)[:max_samples]]  # a limit samples all shards evenly
    vocab_size = model.config.vocab_size
    next_sentence = model.config.next_sentence and shards.next_sentence
    reader = BatchReader(shards, vocab_size=vocab_size, static_shapes=device.static_shapes)
    sums, sequences = np.zeros(3 if next_sentence else 1), 0
    masked_by_piece, right_by_piece = np.zeros((2, vocab_size), np.int64)
    model.to(device.torch_device).eval()
    with work.progress("evaluate", len(samples), "sequences") as bar, torch.no_grad():
        for start in range(0, len(samples), batch_size):
            (batch,), (counts,) = reader.micro_batches(samples[np.s_[start : start + batch_size]], batch_size)
            masked_ids = batch.masked_labels.numpy()
            batch = device.put(batch)
            words, pairs = model.logits(batch)
            scalars = [_summed_loss(words, batch.masked_labels)]
            if pairs is not None and batch.next_sentence_labels is not None:
                right_pairs = (pairs.argmax(-1) == batch.next_sentence_labels).sum()
                scalars += [_summed_loss(pairs, batch.next_sentence_labels), right_pairs]
            right_words = words.argmax(-1) == batch.masked_labels
            # One transfer: on a lazy device, each separate fetch compiles a graph of its own, forward pass included.
            values = torch.stack([value.float() for value in scalars])
            found = torch.cat([values, right_words.float()]).cpu().numpy()
            sums += found[: len(sums)]
            masked_by_piece += np.bincount(masked_ids[masked_ids != IGNORED], minlength=vocab_size)
            right_by_piece += np.bincount(masked_ids[found[len(sums) :] > 0], minlength=vocab_size)
            sequences += counts[1]
            bar.update(len(batch.input_ids))
    masked = _require_masked(shards, int(masked_by_piece.sum()), f"masked token in the {sequences} sequences read")
    length = characters(pieces, masked_by_piece) if pieces else None
    frequencies = count_pieces(work, training or shards, vocab_size)
    return {
        "samples": sequences,
        "masked_tokens": masked,
        "masked_lm_loss": sums[0] / masked,
        **({"next_sentence_loss": sums[1] / sequences} if next_sentence else {}),
        "masked_lm_accuracy": int(right_by_piece.sum()) / masked,
        **({"next_sentence_accuracy": sums[2] / sequences} if next_sentence else {}),
        "bits_per_character": sums[0] / math.log(2) / length if length else None,
        "unigram_from_training": training is not None,
        **frequency_scores(frequencies, masked_by_piece, right_by_piece),
        **({} if tokenizer is None else suggest(model, tokenizer, reader, samples, frequencies, device)),
    }


def _require_usable(shards: ShardSet, model: BertForPreTraining) -> None:
    require_fitting(shards, model.config)
    _require_masked(shards, shards.max_pred_len, MASKED_KEYS[0])


def _require_masked(shards: ShardSet, count: int | None, what: str) -> int:
    """`count`, of which there must be one or more."""
    if not count:
        raise UserError(
            f"the {HELD_OUT_SHARDS} shards of {shards.directory} have no {what}; they must be masked, so that every "
            f"model is asked for the same words; give a directory where they are, as python -m stages.shard makes them"
        )
    return count


def _summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(at_least_fp32(logits), labels, ignore_index=IGNORED, reduction="sum")


def all_samples(shards: ShardSet) -> Samples:
    """All rows of a data set, in order."""
    counts = shards.rows_per_shard
    rows = [np.arange(count) for count in counts]
    return Samples(np.repeat(np.arange(len(counts)), counts), np.concatenate(rows))


def load_model(directory: Path, device: Device) -> BertForPreTraining:
    """Load a Hugging Face directory for `device`. Raises `UserError`."""
    with contextlib.closing(open_checkpoint(directory, optimizer=False)) as contents:
        if contents.format != "hf" or contents.config is None:
            raise UserError(f"{directory} is not a Hugging Face model; give a directory with config.json and weights")
        checkpoint = Checkpoint(contents)
        model = BertForPreTraining(checkpoint.config, device.operations)
        tensors = model.state_dict()
        for name, row, rows in ((chunk.name, chunk.row, chunk.rows) for chunk in checkpoint.stream(MODEL)):
            tensors[name][row : row + len(rows)].copy_(rows)
    return model
