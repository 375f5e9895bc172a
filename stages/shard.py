"""Token ids → the shards of one phase: masked pairs as HDF5. `python -m stages.shard --help`.

First every part of the corpus is cut into pairs, and these are packed into rows if that is wanted (a plan: 13 bytes an
example, its rows shuffled). Then the rows of
all plans are dealt out to the shards, so that these are balanced and each draws from the whole corpus, and every
shard is gathered, shuffled, masked and written by itself. Memory is bounded by a part, a window of the ids and a
slab of a shard; plans and shards are pure functions of the seed and their number, so that neither processes nor
interruptions show.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.disk_space import require_disk_space
from common.errors import UserError
from common.workers import Workers, processes_asked_for
from stages.directory.command import run
from stages.directory.manifest import Identity, StageDirectory, why_incomplete
from stages.directory.records import read_manifest
from stages.examples.pairs import PAIR, SPECIAL_POSITIONS, Form
from stages.examples.plans import PLAN, SplitPlan, SplitTokens, form_of, make_plans, read_splits
from stages.examples.shard_writer import ShardResult, ShardTask, load_vocabulary, make_shard, row_bytes
from stages.tokens.files import STAGE as TOKENS_STAGE
from stages.tokens.files import TEST, TRAINING
from trainer.seeds import derive_seed

STAGE = "shard_dataset"
FORMAT_VERSION = 2  # 2: the phases draw from independent random streams

#: Left to the stage, shards are about this large, and at least so many that two machines share them evenly.
_SHARD_BYTES, _SHARDS_MIN = 64 << 20, 8
#: Sequences in a packed row, at most.
PACKED_SEQUENCES = 16


@dataclass(frozen=True)
class ShardOptions:
    """What decides what is made; see the command's options."""

    form: Form
    #: Training shards; None: as many as make them about 64 MB each.
    shards: int | None = None
    test_shards: int = 1
    seed: int = 12345
    #: The phase that trains on the shards; each has its own random streams.
    phase: int = 1

    def __post_init__(self) -> None:
        form = self.form
        for name, value, low, high in (
            ("--seq-len", form.seq_len, SPECIAL_POSITIONS + 2, 1 << 15),
            ("--max-pred-len", form.max_pred_len, 1, form.seq_len),
            ("--dupe-factor", form.dupe_factor, 1, 1000),
            ("--shards", 1 if self.shards is None else self.shards, 1, 100_000),
            ("--test-shards", self.test_shards, 1, 100_000),
            ("--seed", self.seed, 0, 1 << 63),
            ("--phase", self.phase, 1, 2),
            ("--masked-lm-prob", form.masked_lm_prob, 0, 1),
            ("--short-seq-prob", form.short_seq_prob, 0, 1),
        ):
            if not low <= value <= high:
                raise UserError(f"{name} is {value}; allowed is {low} to {high}")

    def identity(self, tokens: str) -> Identity:
        """`tokens` is the fingerprint of the tokenized corpus."""
        parameters = {**asdict(self.form), "shards": self.shards, "test_shards": self.test_shards, "seed": self.seed}
        return Identity(
            stage=STAGE, format_version=FORMAT_VERSION, phase=self.phase, parameters=parameters,
            upstream={TOKENS_STAGE: tokens},
        )  # fmt: skip


def tokens_fingerprint(directory: Path) -> str:
    """The fingerprint of a finished tokenized corpus; raises `UserError` if there is none in `directory`."""
    manifest = read_manifest(directory)
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

    Raises `UserError` when the corpus is too small, or the space for what will be made.
    """
    form = options.form
    made = []
    with Workers(processes) as workers:
        splits = read_splits(tokens, form)
        if TEST not in splits:
            print("note: no documents were held out, so there are no test shards", file=sys.stderr)
        vocab_size = load_vocabulary(tokens).size
        forms = {split: form_of(split, form) for split in splits}
        # A row holds so many pairs at most.
        least = {
            split: -(-forms[split].dupe_factor * found.least_pairs // forms[split].sequences_per_row)
            for split, found in splits.items()
        }
        _require_room(work.path, splits, least, forms, vocab_size, "plan and shards need at least")
        plans = make_plans(work, splits, form, options.seed, options.phase, workers)
        rows = {split: int(plan.rows.sum()) for split, plan in plans.items()}
        _require_room(work.path, splits, rows, forms, vocab_size, "the shards need")
        tasks = [task for plan in plans.values() for task in _tasks_of(work, tokens, plan, options)]
        with work.progress("shard", len(tasks), "shards") as bar:
            for one in workers.map(make_shard, tasks):
                made.append(one)
                bar.update()
    shutil.rmtree(work.path / PLAN)
    counts = _counts(made, options, vocab_size)
    work.finish([one.output for one in made], counts)
    return counts


def _require_room(
    directory: Path, splits: dict[str, SplitTokens], rows: dict[str, int], forms: dict[str, Form], vocab_size: int,
    what: str,
) -> None:  # fmt: skip
    """Raise `UserError` unless there is room for what is not there yet of plans and shards with so many `rows`."""
    needed = sum(
        rows[split] * (row_bytes(form, vocab_size) + form.sequences_per_row * PAIR.itemsize)
        for split, form in forms.items()
    )
    needed += sum(int(tokens.cut[-1]) * tokens.dtype.itemsize for tokens in splits.values())
    there = [*directory.glob("bert_*.hdf5"), *(directory / PLAN).glob("*.*")]
    require_disk_space(directory, needed - sum(path.stat().st_size for path in there), what)


def _tasks_of(work: StageDirectory, tokens: Path, plan: SplitPlan, options: ShardOptions) -> list[ShardTask]:
    """Share the rows of one split out to its shards."""
    split, form, rows = plan.split, plan.form, int(plan.rows.sum())
    shards = options.test_shards if split == TEST else options.shards or _shards_for(rows, form, tokens)
    if rows < shards:
        raise UserError(
            f"{tokens} gives {rows} {split} rows, too few for {shards} shard{'s' if shards > 1 else ''}; "
            f"ask for fewer shards, or give more text"
        )
    return [
        ShardTask(
            work.path / f"bert_{split}_{shard:05d}.hdf5", tokens, plan, shard, shards, form,
            derive_seed(options.seed, "shuffling and masking", options.phase, split, shard),
        )
        for shard in range(shards)
    ]  # fmt: skip


def _shards_for(rows: int, form: Form, tokens: Path) -> int:
    total = rows * row_bytes(form, load_vocabulary(tokens).size)
    return max(1, min(rows, max(_SHARDS_MIN, -(-total // _SHARD_BYTES))))


def _counts(made: list[ShardResult], options: ShardOptions, vocab_size: int) -> dict[str, Any]:
    rows = {one.output.path: one.rows for one in made}
    total = sum(rows.values())
    return {
        "rows": rows,
        "training_rows": sum(n for name, n in rows.items() if f"_{TRAINING}_" in name),
        "test_rows": sum(n for name, n in rows.items() if f"_{TEST}_" in name),
        "sequences": sum(one.sequences for one in made),
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
    add("--pack", action=argparse.BooleanOptionalAction, default=False, help="several sequences in a row, up to "
        f"{PACKED_SEQUENCES}; held-out ones stay apart")  # fmt: skip
    add("--shards", type=int, default=None, help="training shards (default: about 64 MB each, at least 8)")
    add("--test-shards", type=int, default=1, help="shards of held-out documents (%(default)s)")
    add("--phase", type=int, default=1, help="training phase, 1 or 2: each has its own random streams (%(default)s)")
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
        sequences_per_row=PACKED_SEQUENCES if args.pack else 1,
    )
    options = ShardOptions(form, args.shards, args.test_shards, args.seed, args.phase)
    processes = processes_asked_for(args.processes)
    with StageDirectory.begin(args.out, lambda: options.identity(tokens_fingerprint(args.tokens))) as work:
        counts = shard_dataset(work, args.tokens, options, processes=processes)
    print(f"{counts['training_rows']:,} training and {counts['test_rows']:,} test rows: {args.out}")


if __name__ == "__main__":
    run(main)
