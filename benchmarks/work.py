"""The work that speeds are compared on, and how a comparison is run and told."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.shards import write_shard

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Work:
    """A model, a batch and the shape of its rows."""

    name: str
    layers: int
    hidden: int
    heads: int
    intermediate: int
    vocab_size: int
    seq_len: int
    max_pred_len: int
    micro_batch_size: int
    grad_accum_usteps: int

    def model_config(self) -> dict[str, Any]:
        return {
            "vocab_size": self.vocab_size,
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": 512,
        }

    @property
    def sequences_per_step(self) -> int:
        return self.micro_batch_size * self.grad_accum_usteps


#: The work the published CPU figures in docs/decisions.md were taken on.
A = Work("A", 4, 256, 4, 1024, 8192, 128, 20, 16, 4)


def write_rows(directory: Path, work: Work, *, rows: int = 4096) -> Path:
    """A shard of random rows with the lengths of phase-1 data: 90 % full, the rest shorter; 15 % masked."""
    rng = np.random.default_rng(0)
    lengths = np.where(rng.random(rows) < 0.9, work.seq_len, rng.integers(8, work.seq_len, rows))
    columns = np.arange(work.seq_len)
    mask = columns < lengths[:, None]
    ids = np.where(mask, rng.integers(5, work.vocab_size, mask.shape), 0)
    middle = lengths // 2
    rows_index = np.arange(rows)
    ids[rows_index, 0], ids[rows_index, middle], ids[rows_index, lengths - 1] = 2, 3, 3
    chances = np.where(mask & (ids > 3), rng.random(mask.shape), 2.0)
    count = np.clip(np.round(lengths * 0.15).astype(int), 1, work.max_pred_len)
    order = np.argsort(chances, axis=1)[:, : work.max_pred_len]
    used = np.arange(work.max_pred_len) < count[:, None]
    positions = np.where(used, order, 0)
    labels = np.where(used, np.take_along_axis(ids, order, 1), 0)
    np.put_along_axis(ids, order, np.where(used, 4, np.take_along_axis(ids, order, 1)), 1)
    directory.mkdir(parents=True, exist_ok=True)
    write_shard(
        directory / "random_training_0.hdf5",
        {
            "input_ids": ids.astype(np.uint16),
            "input_mask": mask.astype(np.uint8),
            "segment_ids": (mask & (columns > middle[:, None])).astype(np.uint8),
            "masked_lm_positions": positions.astype(np.uint16),
            "masked_lm_ids": labels.astype(np.uint16),
            "next_sentence_labels": rng.integers(0, 2, rows).astype(np.uint8),
        },
    )
    return directory


@contextmanager
def scratch(work: Work) -> Iterator[tuple[Path, Path, Path]]:
    """A temporary directory, the data set and the model's config.json in it."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        directory = Path(name)
        model = directory / "model.json"
        model.write_text(json.dumps(work.model_config()))
        yield directory, write_rows(directory / "data", work), model


def python(*words: str) -> str:
    """Run `python words…` from the repository root; returns what it printed. Its failure is this program's."""
    # Where torch-xla is installed, Trainer would move to it unasked.
    environment = {**os.environ, "USE_TORCH_XLA": "0"}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def our_step_times(
    work: Work, data: Path, model: Path, out: Path, *more: str, steps: int, precision: str, device: str = "cpu"
) -> list[float]:
    """Seconds of each step of `python -m trainer` on this work; `more`: further options."""
    options = {
        "data_dir": data, "output_dir": out, "model_config": model, "precision": precision, "device": device,
        "batch_size": work.micro_batch_size, "grad_accum_usteps": work.grad_accum_usteps, "max_steps": steps,
        "warmup_steps": 2, "max_pred_len": work.max_pred_len, "ckpt_interval_steps": 0,
    }  # fmt: skip
    python("-m", "trainer", *(word for key, value in options.items() for word in (f"--{key}", str(value))), *more)
    return [json.loads(line)["step_time_s"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def hugging_face_step_times(
    work: Work, data: Path, model: Path, out: Path, *, steps: int, precision: str
) -> list[float]:
    """Seconds of each step of Hugging Face's Trainer on this work."""
    words = ("-m", "benchmarks.hugging_face", str(data), str(model), str(out), f"--precision={precision}")
    batch = (f"--batch-size={work.micro_batch_size}", f"--grad-accum={work.grad_accum_usteps}", f"--steps={steps}")
    times: list[float] = json.loads(python(*words, *batch).splitlines()[-1])
    return times


def steady(times: list[float], *, warm_up: int = 3) -> float:
    """The median of the steps after the first `warm_up`."""
    return statistics.median(times[warm_up:])


def pairs_parser(description: str) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--pairs", type=int, default=3, help="times both sides are run, in turn")
    p.add_argument("--steps", type=int, default=12, help="optimizer steps of each run")
    return p
