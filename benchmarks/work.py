"""Benchmark workloads, the trainings of both sides on them, and the options that benchmarks share."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.processes import ROOT, launcher, python
from stages.examples.form import RowCapacity
from stages.examples.packing import pack, pack_masked, pack_tokens
from trainer.data.shards import LENGTHS_KEY, TOKEN_KEYS, ShardSet, write_shard

#: Folder with sample data and files of other tools; it may be missing.
SHARED = Path(os.environ.get("BERT_SHARED_DIR", ROOT.parent / "shared"))
Arrays = dict[str, np.ndarray[Any, Any]]
#: The first steps of a run, which are slower.
WARM_UP = 3
LEAST_STEPS = WARM_UP + 1


@dataclass(frozen=True)
class Work:
    """A workload: model, batch and row shape."""

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

    def but(self, **changes: Any) -> Work:
        return dataclasses.replace(self, **changes)


#: The workload of the CPU figures in docs/decisions.md.
A = Work("A", 4, 256, 4, 1024, 8192, 128, 20, 16, 4)
#: The same model in phase 2.
A2 = A.but(name="A, phase 2", seq_len=512, max_pred_len=80, micro_batch_size=8)
BASE = Work("BERT-Base", 12, 768, 12, 3072, 30522, 128, 20, 8, 2)


def phase1_lengths(work: Work, rows: int) -> Any:
    """Sequence lengths: 90 % full rows, the others uniform."""
    rng = np.random.default_rng(0)
    return np.where(rng.random(rows) < 0.9, work.seq_len, rng.integers(8, work.seq_len, rows))


def half_padding_lengths(work: Work, rows: int) -> Any:
    """Sequence lengths: a quarter full rows, the others from a truncated exponential distribution.

    At S=512 half of the tokens are padding, as in Wikipedia (Krell et al. 2021, arXiv:2107.02027, section 2).
    """
    rng = np.random.default_rng(0)
    shorter = rng.exponential(0.455 * work.seq_len, 4 * rows)
    shorter = shorter[(shorter >= 8) & (shorter < work.seq_len)][:rows].astype(int)
    return np.where(rng.random(rows) < 0.25, work.seq_len, shorter)


def nvidia_lengths(work: Work, rows: int) -> Any:
    """Lengths from shards that NVIDIA's script made of CPython's documentation (BERT_SHARED_DIR); None without them."""
    directory = SHARED / "fixtures" / "nvidia_hdf5" / f"seq{work.seq_len}"
    if not directory.is_dir():
        return None
    shards = ShardSet.open(directory)
    found = shards.read(0, np.arange(shards.rows))["input_mask"].sum(1, dtype=np.int64)
    return np.random.default_rng(0).choice(found, rows)


def random_rows(work: Work, lengths: Any) -> Arrays:
    """Rows of random ids with the given lengths; 15 % masked."""
    rng, rows = np.random.default_rng(1), len(lengths)
    columns = np.arange(work.seq_len)
    mask = columns < lengths[:, None]
    ids = np.where(mask, rng.integers(5, work.vocab_size, mask.shape), 0)
    middle = lengths // 2
    rows_index = np.arange(rows)
    ids[rows_index, 0], ids[rows_index, middle], ids[rows_index, lengths - 1] = 2, 3, 3
    chances = np.where(mask & (ids > 3), rng.random(mask.shape), 2.0)
    used = np.arange(work.max_pred_len) < masked_of(lengths, work)[:, None]
    order = np.argsort(chances, axis=1)[:, : work.max_pred_len]
    labels = np.where(used, np.take_along_axis(ids, order, 1), 0)
    np.put_along_axis(ids, order, np.where(used, 4, np.take_along_axis(ids, order, 1)), 1)
    return {
        "input_ids": ids.astype(np.uint16),
        "input_mask": mask.astype(np.uint8),
        "segment_ids": (mask & (columns > middle[:, None])).astype(np.uint8),
        "masked_lm_positions": np.where(used, order, 0).astype(np.uint16),
        "masked_lm_ids": labels.astype(np.uint16),
        "next_sentence_labels": rng.integers(0, 2, rows).astype(np.uint8),
    }


def masked_of(lengths: Any, work: Work) -> Any:
    return np.clip(np.round(lengths * 0.15).astype(int), 1, work.max_pred_len)


def packed(rows: Arrays, work: Work) -> Arrays:
    """The same sequences, packed as `stages.shard --pack` packs them, at most 16 in a row."""
    lengths = rows["input_mask"].sum(1, dtype=np.int64)
    of_length = masked_of(np.arange(work.seq_len + 1), work)
    places = pack(lengths, of_length, RowCapacity(work.seq_len, work.max_pred_len, 16))
    chosen, in_row = places[places >= 0], np.where(places >= 0, lengths[places], 0)
    made = {key: pack_tokens(rows[key][chosen], in_row, work.seq_len) for key in TOKEN_KEYS}
    positions, ids = rows["masked_lm_positions"][chosen], rows["masked_lm_ids"][chosen]
    made["masked_lm_positions"], made["masked_lm_ids"] = pack_masked(positions, ids, in_row)
    made["next_sentence_labels"] = np.where(places >= 0, rows["next_sentence_labels"][places], 0).astype(np.uint8)
    made[LENGTHS_KEY] = in_row.astype(np.uint16)
    order = np.random.default_rng(2).permutation(len(places))
    return {key: value[order] for key, value in made.items()}


def write_rows(directory: Path, arrays: Arrays, *, shards: int = 1) -> Path:
    """Write the rows as a data set."""
    directory.mkdir(parents=True, exist_ok=True)
    for shard in range(shards):
        part = {key: value[shard::shards] for key, value in arrays.items()}
        write_shard(directory / f"random_training_{shard}.hdf5", part)
    return directory


@contextmanager
def scratch(work: Work, *, rows: int = 4096, shards: int = 1) -> Iterator[tuple[Path, Path, Path]]:
    """Yield a temporary directory, and in it a phase 1 data set and the model's config file."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        directory = Path(name)
        arrays = random_rows(work, phase1_lengths(work, rows))
        yield directory, write_rows(directory / "data", arrays, shards=shards), model_config(work, directory)


def model_config(work: Work, directory: Path) -> Path:
    path = directory / "model.json"
    path.write_text(json.dumps(work.model_config()))
    return path


def trainer_options(work: Work, data: Path, model: Path, out: Path, *, steps: int, **more: object) -> list[str]:
    """The trainer's options for this workload, without intermediate checkpoints."""
    options = {
        "data_dir": data, "output_dir": out, "model_config": model, "device": "cpu",
        "batch_size": work.micro_batch_size, "grad_accum_usteps": work.grad_accum_usteps, "max_steps": steps,
        "warmup_steps": 2, "max_pred_len": work.max_pred_len, "ckpt_interval_steps": 0, **more,
    }  # fmt: skip
    return [word for key, value in options.items() for word in (f"--{key}", str(value))]


def our_step_times(
    work: Work, data: Path, model: Path, out: Path, *more: str, steps: int, precision: str, device: str = "cpu",
    workers: int = 1,
) -> list[float]:  # fmt: skip
    """Step times of `python -m trainer` on this workload, in seconds; `more`: further options."""
    options = trainer_options(work, data, model, out, steps=steps, precision=precision, device=device)
    python(*launcher(workers), "-m", "trainer", *options, *more)
    return [record["step_time_s"] for record in metrics(out)]


def metrics(out: Path) -> list[dict[str, Any]]:
    """The trainer's record of each step."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def their_step_times(module: str, work: Work, data: Path, model: Path, *more: str, steps: int) -> list[float]:
    """Step times of the reference `benchmarks.<module>` on this workload, in seconds."""
    words = ("-m", f"benchmarks.{module}", str(data), str(model), f"--steps={steps}", *more)
    batch = (f"--batch-size={work.micro_batch_size}", f"--grad-accum={work.grad_accum_usteps}")
    times: list[float] = json.loads(python(*words, *batch).splitlines()[-1])
    return times


def steady(times: list[float]) -> float:
    """The median step time after the first steps."""
    return statistics.median(times[WARM_UP:])


def at_least(least: int) -> Callable[[str], int]:
    """Reads an option that is a number of `least` or more."""

    def count(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is too few; allowed: {least} or more")
        return int(text)

    return count


def pairs_parser(
    description: str | None, *, pairs: int = 3, steps: int | None = 12, cores: int = 2
) -> argparse.ArgumentParser:
    """A parser with the common options; `steps` None omits --steps."""
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--pairs", type=at_least(1), default=pairs, help="runs of each side, alternating")
    if steps is not None:
        p.add_argument("--steps", type=at_least(LEAST_STEPS), default=steps, help="optimizer steps of each run")
    p.add_argument("--cores", type=int, default=cores, help="cores for each side, one thread per core")
    return p
