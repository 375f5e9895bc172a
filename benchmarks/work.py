"""Benchmark workloads, and helpers that run both sides on the same cores with the same number of threads."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import psutil

from common.process import STOP_SIGNALS, die_with_parent, fork_without_warning, heeded_signals
from stages.examples.form import RowCapacity
from stages.examples.packing import pack, pack_masked, pack_tokens
from trainer.data.shards import LENGTHS_KEY, TOKEN_KEYS, ShardSet, write_shard

ROOT = Path(__file__).parent.parent
#: Folder with sample data and files of other tools; it may be missing.
SHARED = Path(os.environ.get("BERT_SHARED_DIR", ROOT.parent / "shared"))
Arrays = dict[str, np.ndarray[Any, Any]]
#: The first steps of a run, which are slower.
WARM_UP = 3


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


def packed(rows: Arrays, work: Work, *, sequences: int = 16) -> Arrays:
    """The same sequences, packed as `stages.shard --pack` packs them."""
    lengths = rows["input_mask"].sum(1, dtype=np.int64)
    of_length = masked_of(np.arange(work.seq_len + 1), work)
    places = pack(lengths, of_length, RowCapacity(work.seq_len, work.max_pred_len, sequences))
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


@contextmanager
def on_cores(count: int, *, threads: int | None = None) -> Iterator[None]:
    """Restrict processes started in the block to `count` cores, with `threads` OpenMP threads (None: one per core)."""
    cores = sorted(os.sched_getaffinity(0))
    if count > len(cores):
        sys.exit(f"error: {count} cores were requested, but there are {len(cores)}; give {len(cores)} or fewer")
    former = os.environ.get("OMP_NUM_THREADS")
    os.sched_setaffinity(0, cores[-count:])
    os.environ["OMP_NUM_THREADS"] = str(threads or count)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        os.environ.pop("OMP_NUM_THREADS")
        if former is not None:
            os.environ["OMP_NUM_THREADS"] = former


def start(
    *words: str, environment: Mapping[str, str] | None = None, cwd: Path = ROOT, **files: Any
) -> subprocess.Popen[Any]:
    """Start `python words…`, which dies with this process; `files`: stdin, stdout, stderr, text."""
    # If torch-xla is installed, Hugging Face's Trainer uses it by default.
    variables = {**os.environ, "USE_TORCH_XLA": "0", **(environment or {})}
    dies = functools.partial(die_with_parent, os.getpid())
    with fork_without_warning():
        return subprocess.Popen([sys.executable, *words], cwd=cwd, env=variables, preexec_fn=dies, **files)


def python(*words: str) -> str:
    """Run `python words…` from the repository root and return its stdout; exits if the command fails."""
    with start(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        output, errors = process.communicate()
    if process.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{output}{errors}")
    return str(output)


def end_all(signum: int, frame: FrameType | None) -> None:
    """On the first stop signal: end all that this process has started, then exit, which cleans up."""
    for other in STOP_SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    sys.exit(128 + signum)


# In every benchmark, but neither in tests of it nor in what it starts.
if (_main := sys.modules["__main__"].__spec__) is not None and _main.name.startswith("benchmarks."):
    for _signum in heeded_signals():
        signal.signal(_signum, end_all)


def launcher(workers: int) -> tuple[str, ...]:
    """The arguments before `-m trainer` that start `workers` workers on this machine."""
    if workers == 1:
        return ()
    return ("-m", "trainer.launch.torchrun", "--standalone", "--local-addr=127.0.0.1", f"--nproc_per_node={workers}")


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


def step_count(text: str) -> int:
    """Read --steps: enough for `steady`."""
    if int(text) <= WARM_UP:
        raise argparse.ArgumentTypeError(f"{text} is too few, as the first {WARM_UP} do not count")
    return int(text)


def pairs_parser(
    description: str | None, *, pairs: int = 3, steps: int | None = 12, cores: int = 2
) -> argparse.ArgumentParser:
    """A parser with the common options; `steps` None omits --steps."""
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--pairs", type=int, default=pairs, help="runs of each side, alternating")
    if steps is not None:
        p.add_argument("--steps", type=step_count, default=steps, help="optimizer steps of each run")
    p.add_argument("--cores", type=int, default=cores, help="cores for each side, one thread per core")
    return p


def busy_s() -> float:
    """Total busy time of all cores since boot, in seconds; 0 without /proc/stat."""
    try:
        user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    except OSError:
        return 0.0
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


@contextmanager
def others_cores() -> Iterator[Callable[[], float]]:
    """Yield a function that returns, after the block, the average number of cores used by unrelated programs."""

    def own_s() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    began, busy, own = time.monotonic(), busy_s(), own_s()
    found = 0.0
    yield lambda: found
    found = max(0.0, (busy_s() - busy - (own_s() - own)) / (time.monotonic() - began))
