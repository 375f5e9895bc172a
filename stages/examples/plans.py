"""The plan of a phase: every part of the corpus cut into sequences, before any shard is written.

A plan consists of temporary files, removed once the shards are complete: for each part its pairs, 13 bytes each, with
those of one row adjacent; and for each split the concatenated ids of all parts, so that rows of many parts can be
gathered together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from common.errors import UserError
from common.files import disk_errors, durable_file
from common.workers import Workers
from stages.directory.builders import Builders
from stages.directory.manifest import StageDirectory
from stages.examples.form import Form
from stages.examples.packing import pack
from stages.examples.pairs import PAIR, lengths_of, plan_pairs
from stages.examples.sentences import plan_sentences, separated
from stages.tokens.files import SPLITS, TRAINING, part_paths, read_part
from trainer.data.hdf5 import Array
from trainer.data.mask_rate import MASKED_LM_PROB
from trainer.seeds import derive_seed

#: Folder of the plan files in the stage directory.
PLAN = "plan"
#: Ids mapped at a time (more only if a single part is larger): mapped pages count as the process's memory.
_WINDOW_BYTES = 128 << 20


@dataclass(frozen=True)
class SplitTokens:
    """The ids of one split, before planning."""

    parts: list[Path]
    #: Offset of each part's ids in the concatenation (`ids_path`), and the total, (parts + 1,) int64.
    cut: Array
    dtype: np.dtype[np.uint16] | np.dtype[np.uint32]
    documents: int
    #: Lower bound on the pairs of one repetition: no pair uses up more than `seq_len` tokens plus one sentence, each
    #: sentence counted as at most `seq_len` tokens.
    least_pairs: int

    @classmethod
    def read(cls, tokens: Path, split: str, form: Form) -> SplitTokens:
        """Read the lengths of all parts. Raises `UserError` if a part was altered."""
        parts = part_paths(tokens, split)
        lengths, documents, capped, dtype = [0], 0, 0, np.dtype(np.uint16)
        for path in parts:
            part = read_part(path)
            lengths.append(len(part["tokens"]) + (0 if form.next_sentence else len(part["document_lengths"])))
            dtype = part["tokens"].dtype
            documents += len(part["document_lengths"])
            capped += int(np.minimum(part["sentence_lengths"], form.seq_len).sum(dtype=np.int64))
        return cls(parts, np.cumsum(lengths), dtype, documents, -(-capped // (2 * form.seq_len)))


@dataclass(frozen=True)
class SplitPlan:
    """One planned split, from which its shards are made."""

    directory: Path
    split: str
    #: As in `SplitTokens`.
    cut: Array
    dtype: np.dtype[np.uint16] | np.dtype[np.uint32]
    form: Form
    #: Rows of each part, (parts,) int64.
    rows: Array

    def windows(self, starts: Array, ends: Array) -> Iterator[tuple[Array, Array]]:
        """Yield (ids, pairs) for rows `starts` … `ends` of each part, in order, several parts at a time.

        pairs: (rows, slots) `PAIR`, ranges of `ids`; an empty slot has length 0.
        """
        first = 0
        while first < len(self.rows):
            limit = self.cut[first] + _WINDOW_BYTES // self.dtype.itemsize
            last = max(first + 1, int(np.searchsorted(self.cut, limit, "right")) - 1)
            yield self._window(first, last, starts, ends)
            first = last

    def _window(self, first: int, last: int, starts: Array, ends: Array) -> tuple[Array, Array]:
        begin, length = int(self.cut[first]), int(self.cut[last] - self.cut[first])
        path = ids_path(self.directory, self.split)
        ids = np.memmap(path, self.dtype, "r", begin * self.dtype.itemsize, (length,))
        found, slots = [], self.form.sequences_per_row
        for part in range(first, last):
            count, offset = int(ends[part] - starts[part]) * slots, int(starts[part]) * slots * PAIR.itemsize
            pairs = np.fromfile(pairs_path(self.directory, self.split, part), PAIR, count, offset=offset)
            pairs["a_start"] += np.uint32(self.cut[part] - begin)
            pairs["b_start"] += np.uint32(self.cut[part] - begin)
            found.append(pairs)
        return ids, np.concatenate(found).reshape(-1, slots)


@dataclass(frozen=True)
class _Task:
    part: Path
    pairs: Path
    form: Form
    seed: int


def ids_path(directory: Path, split: str) -> Path:
    return directory / f"{split}.ids"


def pairs_path(directory: Path, split: str, part: int) -> Path:
    return directory / f"{split}_{part:05d}.bin"


def form_of(split: str, form: Form) -> Form:
    """The form of a split: held-out documents are used once, never packed, and always masked in the same way."""
    if split == TRAINING:
        return form
    return replace(
        form, dupe_factor=1, sequences_per_row=1, is_masked=True, masked_lm_prob=MASKED_LM_PROB, whole_word_mask=False
    )


def make_plans(
    work: StageDirectory,
    splits: dict[str, SplitTokens],
    form: Form,
    *,
    separator: int,
    seed: int,
    phase: int,
    workers: Workers,
    builders: Builders,
) -> dict[str, SplitPlan]:
    """Plan the splits, reusing existing plan files; `separator`: the id of [SEP]. Several `builders` divide the parts.

    Raises `DiskError`.
    """
    directory = work.path / PLAN
    with disk_errors(directory):
        directory.mkdir(exist_ok=True)
    tasks = [
        _Task(
            part, pairs_path(directory, split, index), form_of(split, form),
            derive_seed(seed, "pairs of segments", phase, split, index),
        )
        for split, tokens in splits.items()
        for index, part in enumerate(tokens.parts)
    ]  # fmt: skip
    with builders.progress(work, "plan", len(tasks), "parts") as bar:
        for _ in workers.map(_make_pairs, [task for number, task in enumerate(tasks) if builders.makes(number)]):
            bar.update()
        builders.wait_for(lambda: all(task.pairs.exists() for task in tasks), "the plans of the other machines")
    plans, left = {}, iter([_rows_of(task) for task in tasks])
    for split, tokens in splits.items():
        ids = ids_path(directory, split)
        if builders.is_first:
            _join(tokens.parts, ids, None if form.next_sentence else separator)
        builders.wait_for(ids.exists, "machine 0 to join the ids")
        of_parts = np.array([next(left) for _ in tokens.parts], np.int64)
        plans[split] = SplitPlan(directory, split, tokens.cut, tokens.dtype, form_of(split, form), of_parts)
    return plans


def _rows_of(task: _Task) -> int:
    return task.pairs.stat().st_size // (PAIR.itemsize * task.form.sequences_per_row)


def _make_pairs(task: _Task) -> None:
    """Write the pairs of a part's rows, unless the file exists."""
    if not task.pairs.exists():
        part = read_part(task.part)
        cut = plan_pairs if task.form.next_sentence else plan_sentences
        pairs = cut(
            part["sentence_lengths"].astype(np.int64),
            part["document_lengths"].astype(np.int64),
            task.form,
            rng=(rng := np.random.default_rng(task.seed)),
        )
        if task.form.sequences_per_row > 1:
            pairs = _packed(pairs, task.form, rng)
        with durable_file(task.pairs) as file:
            file.write(pairs.tobytes())


def _packed(pairs: Array, form: Form, rng: np.random.Generator) -> Array:
    """Pack pairs (M,) into rows and shuffle the rows: (rows, slots), zeros in empty slots."""
    chosen = pack(lengths_of(pairs), form.masked_positions(np.arange(form.seq_len + 1)), form.row)
    chosen = chosen[rng.permutation(len(chosen))]
    rows = np.zeros(chosen.shape, PAIR)
    rows[chosen >= 0] = pairs[chosen[chosen >= 0]]
    return rows


def _join(parts: list[Path], path: Path, separator: int | None) -> None:
    """Concatenate the ids of all parts; `separator`: written after each document, if any."""
    if not path.exists():
        with durable_file(path) as file:
            for part in parts:
                ids = read_part(part)["tokens"] if separator is None else separated(part, separator)
                file.write(ids.view(np.uint8).data)


def read_splits(tokens: Path, form: Form) -> dict[str, SplitTokens]:
    """Read the splits; the test split may be missing. Raises `UserError` if one has too few documents."""
    splits = {}
    for split in SPLITS:
        found = SplitTokens.read(tokens, split, form)
        if split != TRAINING and not found.parts:
            continue
        if found.documents < 2 and form.next_sentence:
            raise UserError(
                f"{tokens} has {found.documents} {split} document{'' if found.documents == 1 else 's'}; 2 or more are "
                f"needed, as half of the second segments come from another document; put a blank line between the "
                f"documents of the text, or train without next-sentence prediction"
            )
        if not found.documents:
            raise UserError(f"{tokens} has no {split} documents; give text")
        splits[split] = found
    return splits
