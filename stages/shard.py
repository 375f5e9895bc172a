"""Token ids → the shards of one phase: masked pairs as HDF5. `python -m stages.shard --help`.

First every part of the corpus is cut into pairs (a plan: 13 bytes an example, its rows shuffled). Then the rows of
all plans are dealt out to the shards, so that these are balanced and each draws from the whole corpus, and every
shard is gathered, shuffled, masked and written by itself. Memory is bounded by a part and a slab of a shard; plans
and shards are pure functions of the seed and their number, so that neither processes nor interruptions show.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stages.command import run
from stages.examples import PAIR, SPECIAL_POSITIONS, Form, plan_pairs
from stages.manifest import MANIFEST, Identity, StageDirectory, why_incomplete
from stages.slabs import Made, ShardTask, load_vocabulary, make_shard, row_bytes
from stages.tokens import SPLITS, TEST, TRAINING, part_paths, read_part
from stages.tokens import STAGE as TOKENS_STAGE
from stages.workers import Workers, processes_asked_for
from trainer.errors import UserError
from trainer.files import durable_file, read_json

STAGE = "shard_dataset"
FORMAT_VERSION = 1

#: Where plans wait for the shards to be made; removed when all are.
_PLAN = "plan"
#: Left to the stage, shards are about this large, and at least so many that two machines share them evenly.
_SHARD_BYTES, _SHARDS_MIN = 64 << 20, 8
# The first word of every random seed: plans and shards draw from different streams.
_PLAN_STREAM, _SHARD_STREAM = 1, 2


@dataclass(frozen=True)
class ShardOptions:
    """What decides what is made; see the command's options."""

    form: Form
    #: Training shards; None: as many as make them about 64 MB each.
    shards: int | None = None
    test_shards: int = 1
    seed: int = 12345

    def __post_init__(self) -> None:
        form = self.form
        for name, value, low, high in (
            ("--seq-len", form.seq_len, SPECIAL_POSITIONS + 2, 1 << 15),
            ("--max-pred-len", form.max_pred_len, 1, form.seq_len),
            ("--dupe-factor", form.dupe_factor, 1, 1000),
            ("--shards", 1 if self.shards is None else self.shards, 1, 100_000),
            ("--test-shards", self.test_shards, 1, 100_000),
            ("--seed", self.seed, 0, 1 << 63),
            ("--masked-lm-prob", form.masked_lm_prob, 0, 1),
            ("--short-seq-prob", form.short_seq_prob, 0, 1),
        ):
            if not low <= value <= high:
                raise UserError(f"{name} is {value}; allowed is {low} to {high}")

    def identity(self, tokens: str, phase: int | None = None) -> Identity:
        """`tokens` is the fingerprint of the tokenized corpus."""
        parameters = {**asdict(self.form), "shards": self.shards, "test_shards": self.test_shards, "seed": self.seed}
        return Identity(
            stage=STAGE, format_version=FORMAT_VERSION, phase=phase, parameters=parameters,
            upstream={TOKENS_STAGE: tokens},
        )  # fmt: skip


@dataclass(frozen=True)
class _PlanTask:
    part: Path
    plan: Path
    form: Form
    dupe_factor: int
    seed: tuple[int, ...]


def tokens_fingerprint(directory: Path) -> str:
    """The fingerprint of a finished tokenized corpus; raises `UserError` if there is none in `directory`."""
    manifest = read_json(directory / MANIFEST)
    if manifest is None or manifest["stage"] != TOKENS_STAGE:
        raise UserError(
            f"{directory} is not a finished tokenized corpus; make one there with python -m stages.tokenize"
        )
    fingerprint: str = manifest["fingerprint"]
    if (reason := why_incomplete(directory, fingerprint)) is not None:
        raise UserError(f"the tokenized corpus {directory} cannot be used: {reason}; make it again")
    return fingerprint


def shard_dataset(work: StageDirectory, tokens: Path, options: ShardOptions, *, processes: int) -> dict[str, Any]:
    """Fill `work` with the shards cut from the tokenized corpus in `tokens`, and finish it; returns the counts.

    Raises `UserError` when the corpus is too small.
    """
    (work.path / _PLAN).mkdir(exist_ok=True)
    made = []
    with Workers(processes) as workers:
        tasks = [task for split in SPLITS for task in _tasks_of(work, tokens, split, options, workers)]
        with work.progress("shard", len(tasks), "shards") as bar:
            for one in workers.map(make_shard, tasks):
                made.append(one)
                bar.update()
    shutil.rmtree(work.path / _PLAN)
    counts = _counts(made, options, load_vocabulary(tokens).size)
    work.finish([one.output for one in made], counts)
    return counts


def _tasks_of(
    work: StageDirectory, tokens: Path, split: str, options: ShardOptions, workers: Workers
) -> list[ShardTask]:
    """Plan one split of the corpus, and share the rows out to its shards."""
    parts = part_paths(tokens, split)
    if split == TEST and not parts:
        print("note: no documents were held out, so there are no test shards", file=sys.stderr)
        return []
    documents = sum(len(read_part(part)["document_lengths"]) for part in parts)
    if documents < 2:
        raise UserError(
            f"{tokens} has {documents} {split} document{'' if documents == 1 else 's'}; 2 or more are needed, as half "
            f"of the second segments come from another document; put a blank line between the documents of the text"
        )
    number, form, seed = SPLITS.index(split), options.form, options.seed
    plans = [work.path / _PLAN / f"{split}_{part:05d}.bin" for part in range(len(parts))]
    dupe_factor = form.dupe_factor if split == TRAINING else 1
    rows = []
    with work.progress(f"plan {split}", len(parts), "parts") as bar:
        plan_tasks = (
            _PlanTask(part, plan, form, dupe_factor, (_PLAN_STREAM, number, index, seed))
            for index, (part, plan) in enumerate(zip(parts, plans, strict=True))
        )
        for count in workers.map(_make_plan, plan_tasks):
            rows.append(count)
            bar.update()
    shards = options.test_shards if split == TEST else options.shards or _shards_for(sum(rows), form, tokens)
    if sum(rows) < shards:
        raise UserError(
            f"{tokens} gives {sum(rows)} {split} rows, too few for {shards} shard{'s' if shards > 1 else ''}; "
            f"ask for fewer shards, or give more text"
        )
    return [
        ShardTask(
            work.path / f"bert_{split}_{shard:05d}.hdf5", tokens, parts, plans, np.array(rows), shard, shards, form,
            (_SHARD_STREAM, number, shard, seed),
        )
        for shard in range(shards)
    ]  # fmt: skip


def _shards_for(rows: int, form: Form, tokens: Path) -> int:
    total = rows * row_bytes(form, len(load_vocabulary(tokens).continues))
    return max(1, min(rows, max(_SHARDS_MIN, -(-total // _SHARD_BYTES))))


def _make_plan(task: _PlanTask) -> int:
    """Cut a part into pairs, unless that is done; returns their number."""
    if not task.plan.exists():
        part = read_part(task.part)
        rng = np.random.default_rng(task.seed)
        pairs = plan_pairs(
            part["sentence_lengths"].astype(np.int64),
            part["document_lengths"].astype(np.int64),
            task.form,
            dupe_factor=task.dupe_factor,
            rng=rng,
        )
        with durable_file(task.plan) as file:
            file.write(pairs.tobytes())
    return task.plan.stat().st_size // PAIR.itemsize


def _counts(made: list[Made], options: ShardOptions, vocab_size: int) -> dict[str, Any]:
    rows = {one.output.path: one.rows for one in made}
    total = sum(rows.values())
    return {
        "rows": rows,
        "training_rows": sum(n for name, n in rows.items() if f"_{TRAINING}_" in name),
        "test_rows": sum(n for name, n in rows.items() if f"_{TEST}_" in name),
        "real_token_share": round(sum(one.real_tokens for one in made) / (total * options.form.seq_len), 6),
        "vocab_size": vocab_size,
    }


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="python -m stages.shard", description="Cut tokens into masked pairs.")
    add = options.add_argument
    add("--tokens", type=Path, required=True, metavar="DIR", help="finished directory of stages.tokenize")
    add("--out", type=Path, required=True, metavar="DIR", help="stage directory to make or go on with")
    add("--seq-len", type=int, required=True, help="tokens in a row, 128 or 512 for one")
    add("--max-pred-len", type=int, required=True, help="masked positions in a row, at most: 20 or 80")
    add("--dupe-factor", type=int, default=Form.dupe_factor, help="times each document is used (%(default)s)")
    add("--masked-lm-prob", type=float, default=Form.masked_lm_prob, help="share of tokens masked (%(default)s)")
    add("--short-seq-prob", type=float, default=Form.short_seq_prob, help="share made shorter (%(default)s)")
    add("--whole-word-mask", action=argparse.BooleanOptionalAction, default=False, help="mask all pieces of a word")
    add("--shards", type=int, default=None, help="training shards (default: about 64 MB each, at least 8)")
    add("--test-shards", type=int, default=1, help="shards of held-out documents (%(default)s)")
    add("--seed", type=int, default=12345, help="decides pairs and masks (%(default)s)")
    add("--processes", type=int, default=0, help="changes no output (default: one for each core)")
    return options


def main() -> None:
    args = parser().parse_args()
    form = Form(
        seq_len=args.seq_len,
        max_pred_len=args.max_pred_len,
        dupe_factor=args.dupe_factor,
        masked_lm_prob=args.masked_lm_prob,
        short_seq_prob=args.short_seq_prob,
        whole_word_mask=args.whole_word_mask,
    )
    options = ShardOptions(form, shards=args.shards, test_shards=args.test_shards, seed=args.seed)
    processes = processes_asked_for(args.processes)
    with StageDirectory.begin(args.out, lambda: options.identity(tokens_fingerprint(args.tokens))) as work:
        counts = shard_dataset(work, args.tokens, options, processes=processes)
    print(f"{counts['training_rows']:,} training and {counts['test_rows']:,} test rows: {args.out}")


if __name__ == "__main__":
    run(main)
