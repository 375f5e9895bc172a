"""Writes one shard: selects its rows from the plan, gathers their tokens, shuffles, masks and writes them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stages.directory.manifest import Output
from stages.examples.form import Form
from stages.examples.packing import pack_masked, pack_tokens, real_places, unpack_tokens
from stages.examples.pairs import PAIR, complete_rows, gather_rows, lengths_of
from stages.examples.plans import SplitPlan
from stages.text.corpus import TOKENIZER
from trainer.data.hdf5 import Array, Layout, contiguous_file, map_contiguous, open_hdf5
from trainer.data.shards import LENGTHS_KEY, id_dtype, shard_layout
from trainer.data.vocabulary import VOCABULARY_FILE, Vocabulary, read_vocabulary

#: Rows are shuffled and masked in slabs of about this size, which bounds a process's memory.
_SLAB_BYTES = 64 << 20
_GATHERED_ROWS = 2048


@dataclass(frozen=True)
class ShardTask:
    path: Path
    tokens: Path
    plan: SplitPlan
    shard: int
    shards: int
    form: Form
    seed: int


@dataclass(frozen=True)
class ShardResult:
    output: Output
    rows: int
    sequences: int
    real_tokens: int


def layout_of(rows: int, form: Form, vocab_size: int) -> Layout:
    return shard_layout(
        rows, seq_len=form.seq_len, max_pred_len=form.max_pred_len, vocab_size=vocab_size,
        sequences_per_row=form.sequences_per_row, is_masked=form.is_masked, next_sentence=form.next_sentence,
    )  # fmt: skip


def row_bytes(form: Form, vocab_size: int) -> int:
    layout = layout_of(1, form, vocab_size)
    return sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in layout.values())


def row_ranges(rows: Array, shares: int, share: int) -> tuple[Array, Array]:
    """Start and end of share `share` of `shares` within each of several groups of `rows`, both (groups,) int64.

    The counts are those of dealing out all rows round-robin, group after group, while each share's rows of a group are
    contiguous: shares differ by at most one row, and each takes its proportion of every group.
    """
    ends = np.cumsum(rows)

    def before(place: Array, which: int) -> Array:
        """Number of the first `place` rows that go to shares below `which`."""
        result: Array = which * (place // shares) + np.minimum(which, place % shares)
        return result

    starts = ends - rows
    return before(ends, share) - before(starts, share), before(ends, share + 1) - before(starts, share + 1)


def make_shard(task: ShardTask) -> ShardResult:
    """Write a shard unless it exists; returns its counts."""
    if not task.path.exists():
        vocabulary = load_vocabulary(task.tokens)
        form, rng = task.form, np.random.default_rng(task.seed)
        starts, ends = row_ranges(task.plan.rows, task.shards, task.shard)
        total = int((ends - starts).sum())
        layout = layout_of(total, form, vocabulary.size)
        slabs = max(1, -(-total * row_bytes(form, vocabulary.size) // _SLAB_BYTES))
        with contiguous_file(task.path, layout) as writer:
            row = 0
            for slab in range(slabs):
                first, last = row_ranges(ends - starts, slabs, slab)
                arrays = _make_slab(task, starts + first, starts + last, vocabulary, rng)
                for key in layout:
                    writer.write(key, row, arrays[key])
                row += len(arrays["input_ids"])
            assert row == total, f"{row} of {total} rows"
    with open_hdf5(task.path) as file:
        mapped = map_contiguous(task.path, file, ("input_mask",))
        packed = map_contiguous(task.path, file, (LENGTHS_KEY,)) if LENGTHS_KEY in file else None
    assert mapped is not None
    mask = mapped.arrays["input_mask"]
    sequences = len(mask) if packed is None else int(np.count_nonzero(packed.arrays[LENGTHS_KEY]))
    return ShardResult(Output.of(task.path.parent, task.path), len(mask), sequences, int(np.count_nonzero(mask)))


def _make_slab(
    task: ShardTask, starts: Array, ends: Array, vocabulary: Vocabulary, rng: np.random.Generator
) -> dict[str, Array]:
    """The arrays of a shard for rows `starts` … `ends` of every part, shuffled."""
    form = task.form
    order = rng.permutation(int((ends - starts).sum()))
    pairs = np.empty((len(order), form.sequences_per_row), PAIR)
    rows = np.empty((len(order), form.seq_len), id_dtype(vocabulary.size))
    done = 0
    for ids, found in task.plan.windows(starts, ends):
        for start in range(0, len(found), _GATHERED_ROWS):
            some = found[start : start + _GATHERED_ROWS]
            places = order[done : done + len(some)]
            pairs[places] = some
            rows[places] = _gather(ids, some, vocabulary, form)
            done += len(some)
    if form.sequences_per_row == 1:
        return complete_rows(rows, pairs[:, 0], form, vocabulary, rng=rng)
    return _complete_packed(rows, pairs, form, vocabulary, rng)


def _gather(ids: Array, pairs: Array, vocabulary: Vocabulary, form: Form) -> Array:
    """The unmasked rows (N, S) of `pairs` (N, slots)."""
    if form.sequences_per_row == 1:
        return gather_rows(ids, pairs[:, 0], vocabulary, form.seq_len)
    lengths = lengths_of(pairs)
    return pack_tokens(gather_rows(ids, pairs[lengths > 0], vocabulary, form.seq_len), lengths, form.seq_len)


def _complete_packed(
    rows: Array, pairs: Array, form: Form, vocabulary: Vocabulary, rng: np.random.Generator
) -> dict[str, Array]:
    """Like `complete_rows`, for packed rows (N, S): each sequence is masked as if it were alone in its row."""
    lengths = lengths_of(pairs)
    arrays = {
        key: np.zeros(shape, dtype) for key, (shape, dtype) in layout_of(len(rows), form, vocabulary.size).items()
    }
    arrays[LENGTHS_KEY][:] = lengths
    arrays["input_mask"][:] = real_places(lengths.sum(1), form.seq_len)
    for start in range(0, len(rows), _GATHERED_ROWS):
        here = slice(start, start + _GATHERED_ROWS)
        there = lengths[here] > 0
        own = complete_rows(unpack_tokens(rows[here], lengths[here]), pairs[here][there], form, vocabulary, rng=rng)
        for key in ("input_ids", "segment_ids"):
            arrays[key][here] = pack_tokens(own[key], lengths[here], form.seq_len)
        if form.is_masked:
            arrays["masked_lm_positions"][here], arrays["masked_lm_ids"][here] = pack_masked(
                own["masked_lm_positions"], own["masked_lm_ids"], lengths[here]
            )
        if form.next_sentence:
            arrays["next_sentence_labels"][here][there] = own["next_sentence_labels"]
    return arrays


@functools.cache
def load_vocabulary(tokens: Path) -> Vocabulary:
    return Vocabulary.of(read_vocabulary(tokens / TOKENIZER / VOCABULARY_FILE))
