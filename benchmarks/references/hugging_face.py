"""The other side: Hugging Face's Trainer with its own BertForPreTraining, on the same shards. Prints step times."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from trainer.data.shards import ShardSet


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """All rows of a data set in memory, as the model's keyword arguments; labels are -100 where nothing is masked."""

    def __init__(self, directory: Path) -> None:
        shards = ShardSet.open(directory)
        rows = [shards.read(shard, np.arange(count)) for shard, count in enumerate(shards.rows_per_shard)]
        data = {key: np.concatenate([part[key] for part in rows]).astype(np.int64) for key in rows[0]}
        labels = np.full_like(data["input_ids"], -100)
        at, column = np.nonzero(data["masked_lm_positions"])
        labels[at, data["masked_lm_positions"][at, column]] = data["masked_lm_ids"][at, column]
        names = {"input_ids": "input_ids", "input_mask": "attention_mask", "segment_ids": "token_type_ids",
                 "next_sentence_labels": "next_sentence_label"}  # fmt: skip
        self._data = {theirs: torch.from_numpy(data[ours]) for ours, theirs in names.items()}
        self._data["labels"] = torch.from_numpy(labels)

    def __len__(self) -> int:
        return len(self._data["labels"])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: tensor[index] for name, tensor in self._data.items()}


class Clock(transformers.TrainerCallback):
    """Notes when each optimizer step ends."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.times.append(time.monotonic())

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.times.append(time.monotonic())


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options of every script that trains for comparison with us."""
    p = argparse.ArgumentParser(description=description)
    p.add_argument("data", type=Path)
    p.add_argument("model", type=Path)
    p.add_argument("--batch-size", type=int, required=True)
    p.add_argument("--grad-accum", type=int, required=True)
    p.add_argument("--steps", type=int, required=True)
    return p


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--precision", choices=("fp32", "autocast"), default="fp32")
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = p.parse_args()
    model = transformers.BertForPreTraining(transformers.BertConfig(**json.loads(args.model.read_text())))
    clock = Clock()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as out:
        settings = transformers.TrainingArguments(
            output_dir=out, use_cpu=args.device == "cpu", bf16=args.precision == "autocast", max_grad_norm=1.0,
            per_device_train_batch_size=args.batch_size, gradient_accumulation_steps=args.grad_accum,
            max_steps=args.steps, warmup_steps=2, weight_decay=0.01, save_strategy="no", report_to=[],
            disable_tqdm=True, logging_steps=args.steps,
        )  # fmt: skip
        transformers.Trainer(model, settings, train_dataset=Rows(args.data), callbacks=[clock]).train()
    print(json.dumps(np.diff(clock.times).tolist()))


if __name__ == "__main__":
    main()
