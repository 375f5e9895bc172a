"""Token ids → the shards of one phase.

Every part of the corpus is cut into pairs of segments, or into sequences of whole sentences, which are optionally
packed into rows (the plan: 13 bytes per sequence, rows shuffled). The rows of all plans are then distributed over the
shards, so that shards are balanced and each samples the whole corpus; every shard is gathered, shuffled, masked and
written independently. Memory is bounded by a part, a window of the ids and a slab of a shard. Plans and shards are pure
functions of the seed and their index, so neither the number of processes nor an interruption changes a byte.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.disk_space import require_disk_space
from common.errors import UserError
from common.files import TEMPORARY_SUFFIX, durable_file
from common.workers import Workers
from stages.directory.builders import Builders
from stages.directory.manifest import Output, StageDirectory
from stages.examples.form import Form
from stages.examples.pairs import PAIR
from stages.examples.plans import PLAN, SplitPlan, SplitTokens, form_of, make_plans, read_splits
from stages.examples.shard_writer import ShardResult, ShardTask, load_vocabulary, make_shard, row_bytes
from stages.text.corpus import TOKENIZER
from stages.tokens.files import TEST, TRAINING
from trainer.data.vocabulary import VOCABULARY_FILE
from trainer.seeds import derive_seed

#: Default shard size, and minimum number of shards, so that two machines share them evenly.
_SHARD_BYTES, _SHARDS_MIN = 64 << 20, 8


def make_shards(
    work: StageDirectory,
    tokens: Path,
    form: Form,
    *,
    shards: Mapping[str, int | None],
    seed: int,
    phase: int,
    processes: int,
    builders: Builders,
) -> dict[str, Any]:
    """Write the shards of the tokenized corpus `tokens` to `work` and complete it; returns the counts.

    `shards`: number of shards per split; None: as many as give about 64 MB each. Raises `UserError` if the corpus is
    too small, `DiskError` if the disk lacks space. With several `builders`, all but the first only write shards, and
    return {} when the stage is complete.
    """
    with Workers(processes) as workers:
        splits = read_splits(tokens, form)
        if TEST not in splits:
            print("note: no documents were held out, so there are no test shards", file=sys.stderr)
        vocab_size = load_vocabulary(tokens).size
        forms = {split: form_of(split, form) for split in splits}
        # A lower bound: every row filled with the maximum number of pairs.
        least = {
            split: -(-forms[split].dupe_factor * found.least_pairs // forms[split].sequences_per_row)
            for split, found in splits.items()
        }
        _require_room(work.path, splits, least, forms, vocab_size, "plan and shards need at least")
        separator = load_vocabulary(tokens).sep
        plans = make_plans(
            work, splits, form, separator=separator, seed=seed, phase=phase, workers=workers, builders=builders
        )
        rows = {split: int(plan.rows.sum()) for split, plan in plans.items()}
        _require_room(work.path, splits, rows, forms, vocab_size, "the shards need")
        tasks = [
            task for split, plan in plans.items() for task in _tasks_of(work, tokens, plan, shards[split], seed, phase)
        ]
        made = _make_all(work, tasks, workers, builders)
    if not builders.is_first:
        return {}
    counts = _counts(made, form, vocab_size)
    outputs = [one.output for one in made]
    if not form.is_masked:
        vocabulary = work.path / VOCABULARY_FILE
        with durable_file(vocabulary) as file:
            file.write((tokens / TOKENIZER / VOCABULARY_FILE).read_bytes())
        outputs.append(Output.of(work.path, vocabulary))
    if builders.count == 1:  # before the manifest: a complete stage is never begun again, and the plan would stay
        shutil.rmtree(work.path / PLAN, ignore_errors=True)
    work.finish(outputs, counts)
    # If the first of several machines is restarted, it needs the plan, which the others no longer make.
    shutil.rmtree(work.path / PLAN, ignore_errors=True)
    return counts


def _make_all(work: StageDirectory, tasks: list[ShardTask], workers: Workers, builders: Builders) -> list[ShardResult]:
    """Make this machine's shards, then wait: the first machine for the others' shards, the others for the manifest.
    Returns the results of all on the first machine, which reads the others' shards for this; [] on the others."""
    mine = [number for number in range(len(tasks)) if builders.makes(number)]
    others = [number for number in range(len(tasks)) if not builders.makes(number)]
    made: dict[int, ShardResult] = {}
    with builders.progress(work, "shard", len(tasks), "shards") as bar:
        for number, one in zip(mine, workers.map(make_shard, [tasks[n] for n in mine]), strict=True):
            made[number] = one
            bar.update()
        if not builders.is_first:
            builders.wait_for_end(work)
            return []
        builders.wait_for(lambda: all(tasks[n].path.exists() for n in others), "the shards of the other machines")
        for number, one in zip(others, workers.map(make_shard, [tasks[n] for n in others]), strict=True):
            made[number] = one
            bar.update()
    return [made[number] for number in range(len(tasks))]


def _require_room(
    directory: Path, splits: dict[str, SplitTokens], rows: dict[str, int], forms: dict[str, Form], vocab_size: int,
    what: str,
) -> None:  # fmt: skip
    """Raise `UserError` unless the missing plans and shards of `rows` rows fit on the disk."""
    needed = sum(
        rows[split] * (row_bytes(form, vocab_size) + form.sequences_per_row * PAIR.itemsize)
        for split, form in forms.items()
    )
    needed += sum(int(tokens.cut[-1]) * tokens.dtype.itemsize for tokens in splits.values())
    found = [*directory.glob("bert_*.hdf5"), *(directory / PLAN).glob("*.*")]
    # Temporary files belong to other machines and may vanish at any time.
    existing = sum(path.stat().st_size for path in found if path.suffix != TEMPORARY_SUFFIX)
    require_disk_space(directory, needed - existing, what)


def _tasks_of(
    work: StageDirectory, tokens: Path, plan: SplitPlan, wanted: int | None, seed: int, phase: int
) -> list[ShardTask]:
    """The shard tasks of one split."""
    split, form, rows = plan.split, plan.form, int(plan.rows.sum())
    shards = wanted or _shards_for(rows, form, tokens)
    if rows < shards:
        raise UserError(
            f"{tokens} gives {rows} {split} rows, too few for {shards} shard{'s' if shards > 1 else ''}; "
            f"ask for fewer shards, or give more text"
        )
    return [
        ShardTask(
            work.path / f"bert_{split}_{shard:05d}.hdf5", tokens, plan, shard, shards, form,
            derive_seed(seed, "shuffling and masking", phase, split, shard),
        )
        for shard in range(shards)
    ]  # fmt: skip


def _shards_for(rows: int, form: Form, tokens: Path) -> int:
    total = rows * row_bytes(form, load_vocabulary(tokens).size)
    return max(1, min(rows, max(_SHARDS_MIN, -(-total // _SHARD_BYTES))))


def _counts(made: list[ShardResult], form: Form, vocab_size: int) -> dict[str, Any]:
    rows = {one.output.path: one.rows for one in made}
    total = sum(rows.values())
    return {
        "rows": rows,
        "training_rows": sum(n for name, n in rows.items() if f"_{TRAINING}_" in name),
        "test_rows": sum(n for name, n in rows.items() if f"_{TEST}_" in name),
        "sequences": sum(one.sequences for one in made),
        "real_token_share": round(sum(one.real_tokens for one in made) / (total * form.seq_len), 6),
        "vocab_size": vocab_size,
    }
