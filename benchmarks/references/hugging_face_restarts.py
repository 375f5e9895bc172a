"""Hugging Face's Trainer with checkpoints, as torchrun restarts it: resumes from the last whole one in OUT, if
there is one. Appends "step seconds-since-1970" to OUT/steps at the end of each step."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import transformers

from benchmarks.references.hugging_face import Rows, parser


class Journal(transformers.TrainerCallback):
    def __init__(self, path: Path) -> None:
        self._path = path

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            with self._path.open("a") as file:
                file.write(f"{state.global_step} {time.time()}\n")


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--save-steps", type=int, required=True)
    args = p.parse_args()
    model = transformers.BertForPreTraining(transformers.BertConfig(**json.loads(args.model.read_text())))
    settings = transformers.TrainingArguments(
        output_dir=str(args.out), use_cpu=True, max_grad_norm=1.0, per_device_train_batch_size=args.batch_size,
        gradient_accumulation_steps=args.grad_accum, max_steps=args.steps, warmup_steps=2, weight_decay=0.01,
        save_strategy="steps", save_steps=args.save_steps, save_total_limit=2, report_to=[], disable_tqdm=True,
        logging_steps=args.steps,
    )  # fmt: skip
    args.out.mkdir(exist_ok=True)
    trainer = transformers.Trainer(
        model, settings, train_dataset=Rows(args.data), callbacks=[Journal(args.out / "steps")]
    )
    # Trainer writes trainer_state.json last; resuming from a checkpoint without it would fail forever.
    whole = {int(path.parent.name.rpartition("-")[2]): path.parent for path in args.out.glob("*/trainer_state.json")}
    trainer.train(resume_from_checkpoint=str(whole[max(whole)]) if whole else None)


if __name__ == "__main__":
    main()
