"""A made-up language that a small BERT learns within a few hundred steps, and trainings on it in this process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config import TrainConfig
from trainer.data.bert_batch import BertBatch
from trainer.data.mask_rate import MaskRate
from trainer.data.masking import Masking
from trainer.data.order import Samples
from trainer.data.reader import BatchReader, Counts
from trainer.data.shards import ShardSet, write_shard
from trainer.data.vocabulary import VOCABULARY_FILE
from trainer.devices.cpu import CpuDevice
from trainer.launch.preemption import Interruptions
from trainer.loop import Trainer
from trainer.models.base import Model
from trainer.models.config import ModelConfig
from trainer.parallel.mesh import Mesh
from trainer.run import Run
from trainer.workloads.bert import BertWorkload

VOCAB, ROWS, S, P = 500, 8000, 32, 5
_FIRST, _CLS, _SEP, _MASK = 5, 2, 3, 4
Fault = Callable[[BertBatch, int], BertBatch]
Change = Callable[[dict[str, np.ndarray]], None]


def sentences(rows: int, length: int, seed: int) -> np.ndarray:
    """(rows, length) ids of a Markov chain: words by Zipf's law, each followed in 3 of 4 cases by one of its two
    favourites."""
    rng = np.random.default_rng(seed)
    words = VOCAB - _FIRST
    frequency = 1 / np.arange(1, words + 1)
    frequency /= frequency.sum()
    favourites = np.random.default_rng(0).choice(words, (words, 2), p=frequency)  # the same in every data set
    text = np.empty((rows, length), np.int64)
    text[:, 0] = rng.choice(words, rows, p=frequency)
    for place in range(1, length):
        likely = favourites[text[:, place - 1], rng.integers(0, 2, rows)]
        text[:, place] = np.where(rng.random(rows) < 0.75, likely, rng.choice(words, rows, p=frequency))
    return text + _FIRST


def write_language(directory: Path, *, static: bool = False, change: Change = lambda arrays: None) -> Path:
    """Training shards of the language, in rows with up to a third of padding; `static`: with masks. `change`: puts a
    fault into the arrays."""
    directory.mkdir(parents=True)
    rng = np.random.default_rng(1)
    lengths = rng.integers(2 * S // 3, S + 1, ROWS)
    place = np.arange(S)
    mask = (place < lengths[:, None]).astype(np.uint8)
    ids = np.where(mask, sentences(ROWS, S, seed=1), 0).astype(np.uint16)
    middle = lengths // 2
    ids[:, 0] = _CLS
    for ends in (middle, lengths - 1):
        ids[np.arange(ROWS), ends] = _SEP
    arrays = {
        "input_ids": ids,
        "input_mask": mask,
        "segment_ids": ((place > middle[:, None]) & (mask > 0)).astype(np.uint8),
        "next_sentence_labels": rng.integers(0, 2, ROWS).astype(np.uint8),
    }
    if static:
        arrays |= _masked(arrays, rng)
    change(arrays)
    for shard in range(2):
        write_shard(directory / f"x_training_{shard}.hdf5", {key: value[shard::2] for key, value in arrays.items()})
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(VOCAB - _FIRST))]
    (directory / VOCABULARY_FILE).write_text("\n".join(pieces) + "\n")
    return directory


def _masked(arrays: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Mask P tokens of each row as BERT does: 80 % [MASK], 10 % any token, 10 % unchanged."""
    ids, each = arrays["input_ids"], np.arange(ROWS)[:, None]
    draws = np.where(ids >= _FIRST, rng.random(ids.shape), 2)
    positions = np.sort(np.argsort(draws, axis=1)[:, :P], axis=1)
    labels = ids[each, positions].copy()
    fate, words = rng.random(labels.shape), rng.integers(_FIRST, VOCAB, labels.shape)
    ids[each, positions] = np.where(fate < 0.8, _MASK, np.where(fate < 0.9, labels, words))
    return {"masked_lm_positions": positions.astype(np.uint16), "masked_lm_ids": labels}


class _FaultyReader(BatchReader):
    """Hands out batches with a fault in them."""

    fault: Fault

    def micro_batches(
        self, samples: Samples, size: int, *, step: int = 0, epoch: int = 0
    ) -> tuple[list[BertBatch], list[Counts]]:
        batches, counts = super().micro_batches(samples, size, step=step, epoch=epoch)
        return [self.fault(batch, step + at) for at, batch in enumerate(batches)], counts


class _Workload(BertWorkload):
    fault: Fault | None = None

    def reader(self, **given: Any) -> BatchReader:
        reader = super().reader(**given)
        if self.fault is not None:
            reader.__class__ = _FaultyReader
            reader.fault = self.fault  # type: ignore[attr-defined]
        return reader


def train_here(
    data: Path, out: Path, *, prepare: Callable[[Model], None] = lambda model: None, **given: Any
) -> list[str]:
    """Train as `trainer_here` says; returns the log's lines. `prepare`: changes the model before the first step."""
    trainer, lines = trainer_here(data, out, **given)
    prepare(trainer.model)
    assert trainer.train()
    return lines


def trainer_here(
    data: Path,
    out: Path,
    *,
    steps: int = 200,
    fault: Fault | None = None,
    model: dict[str, int] | None = None,
    rates: Sequence[float | None] = (None, None),
    vocab_size: int = VOCAB,
    initial: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Trainer, list[str]]:
    """A trainer for `steps` steps in this process, and the lines that its log will get. `rates`: the first and last
    share of masked tokens; `initial`: more of the workload's options."""
    shards = ShardSet.open(data)
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128}
    config = ModelConfig(
        vocab_size=vocab_size, max_position_embeddings=shards.seq_len, **{**sizes, **(model or {})}
    ).without_dropout()
    masking = Masking(MaskRate.of(*rates)) if shards.max_pred_len is None else None
    workload = _Workload(config, shards, masking, **(initial or {}))
    workload.fault = fault
    given = {"micro_batch_size": 16, "max_steps": steps, "warmup_steps": 10, "lr": 2e-3, "phase1_end_step": 0}
    train_config = TrainConfig(
        **{
            "output_dir": out,
            "stop_step": steps,
            "grad_accum_usteps": 1,
            "device": "cpu",
            "precision": "fp32",
            **given,
            **options,
        }
    )
    lines: list[str] = []
    trainer = Trainer(
        Run(train_config, workload, CpuDevice(threads=1), Mesh(), lines.append),
        Interruptions(out, is_root=True, watches_spot=False),
    )
    return trainer, lines


def replaced(batch: BertBatch, **fields: Any) -> BertBatch:
    return dataclasses.replace(batch, **fields)
