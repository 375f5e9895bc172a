"""The other side of `benchmarks.quality`: Hugging Face's Trainer with BertForMaskedLM and
`DataCollatorForLanguageModeling`, on the unmasked rows of our shards. Prints its seconds, and its held-out loss and
accuracy on the masks of our held-out shards."""

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

from trainer.data.order import shuffled
from trainer.data.shards import MASKED_KEYS, ShardSet

#: transformers' names for our settings.
NAMES = {"input_ids": "input_ids", "input_mask": "attention_mask", "segment_ids": "token_type_ids"}
IGNORED = -100
#: More steps than there is time for.
MOST_STEPS = 1_000_000


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """All rows of a data set in memory, as the model's keyword arguments; with labels if the shards are masked."""

    def __init__(self, shards: ShardSet) -> None:
        rows = [shards.read(shard, np.arange(count)) for shard, count in enumerate(shards.rows_per_shard)]
        data = {key: np.concatenate([part[key] for part in rows]).astype(np.int64) for key in rows[0]}
        self._data = {theirs: torch.from_numpy(data[ours]) for ours, theirs in NAMES.items()}
        if MASKED_KEYS[0] in data:
            positions, ids = (data[key] for key in MASKED_KEYS)
            labels = np.full_like(data["input_ids"], IGNORED)
            row, entry = np.nonzero(positions)
            labels[row, positions[row, entry]] = ids[row, entry]
            self._data["labels"] = torch.from_numpy(labels)

    def __len__(self) -> int:
        return len(self._data["input_ids"])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: tensor[index] for name, tensor in self._data.items()}


@torch.no_grad()
def held_out(model: Any, rows: torch.utils.data.Dataset[dict[str, Any]], batch_size: int = 16) -> tuple[float, float]:
    """Mean loss in nats and accuracy over the masked tokens."""
    model.eval()
    loss, right, masked = 0.0, 0, 0
    for batch in torch.utils.data.DataLoader(rows, batch_size):
        labels = batch.pop("labels")
        logits, labels = model(**batch).logits[labels != IGNORED].float(), labels[labels != IGNORED]
        loss += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
        right += int((logits.argmax(-1) == labels).sum())
        masked += len(labels)
    return loss / masked, right / masked


class End(transformers.TrainerCallback):
    """Ends training at a given time."""

    def __init__(self, at: float) -> None:
        self._at = at

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if time.monotonic() > self._at:  # else it stays what Trainer has decided
            control.should_training_stop = True


class TimedTrainer(transformers.Trainer):
    """Its rate falls linearly with the time, as by default it does with the steps: how many fit is not known."""

    def __init__(self, model: Any, settings: transformers.TrainingArguments, *, seconds: float, **named: Any) -> None:
        self._began, self._seconds = time.monotonic(), seconds
        super().__init__(model, settings, **{**named, "callbacks": [End(self._began + seconds)]})

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """As a share of the peak rate."""
        chosen = optimizer or self.optimizer
        assert chosen is not None
        warmup_steps = max(1, self.args.warmup_steps)

        def share(step: int) -> float:
            left = max(0.0, 1 - (time.monotonic() - self._began) / self._seconds)
            return left * min(1.0, (step + 1) / warmup_steps)

        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(chosen, share)
        return self.lr_scheduler


def train(args: argparse.Namespace, shards: ShardSet) -> transformers.Trainer:
    """Train a new model for `args.seconds`."""
    transformers.set_seed(args.seed)
    tokenizer = transformers.BertTokenizer.from_pretrained(args.data)
    model = transformers.BertForMaskedLM(transformers.BertConfig(**json.loads(args.model.read_text())))
    with tempfile.TemporaryDirectory(prefix="benchmark-") as out:
        settings = transformers.TrainingArguments(
            output_dir=out, use_cpu=True, bf16=args.bf16, per_device_train_batch_size=args.batch_size,
            max_steps=MOST_STEPS, warmup_steps=args.warmup_steps, learning_rate=args.lr, seed=args.seed,
            save_strategy="no", report_to=[], disable_tqdm=True, logging_steps=MOST_STEPS,
        )  # fmt: skip
        trainer = TimedTrainer(
            model, settings, train_dataset=Rows(shards), seconds=args.seconds,
            data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15),
        )  # fmt: skip
        trainer.train()
    return trainer


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("data", type=Path)
    p.add_argument("model", type=Path, help="config.json")
    p.add_argument("--seconds", type=float, required=True, help="time to train, which its schedule follows")
    p.add_argument("--batch-size", type=int, default=8)
    p.add_argument("--lr", type=float, default=5e-5)
    p.add_argument("--warmup-steps", type=int, default=0)
    p.add_argument("--bf16", action="store_true")
    p.add_argument("--seed", type=int, default=42)
    p.add_argument("--samples", type=int, required=True, help="held-out rows")
    args = p.parse_args()
    shards = ShardSet.open(args.data)
    began = time.monotonic()
    trainer = train(args, shards)
    seconds, done = time.monotonic() - began, trainer.state.global_step
    rows = Rows(ShardSet.open(args.data, "*_test_*.hdf5"))
    chosen = shuffled(len(rows), 0)[: args.samples]  # as `python -m stages.evaluate` does
    model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)  # as ours is evaluated
    loss, accuracy = held_out(model, torch.utils.data.Subset(rows, chosen.tolist()))
    print(json.dumps({"seconds": seconds, "loss": loss, "accuracy": accuracy, "steps": done}))


if __name__ == "__main__":
    main()
