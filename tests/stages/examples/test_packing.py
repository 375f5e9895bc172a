"""Packing: rows are full, every example is in them once and unchanged, and examples do not affect each other."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from common.errors import UserError
from stages.examples.form import PACKED_SEQUENCES, Form, RowCapacity
from stages.examples.packing import pack, pack_masked, pack_tokens, unpack_tokens
from tests.conftest import Stage
from tests.helpers.corpora import make_tokens
from tests.helpers.ready import bytes_of
from trainer.data.hdf5 import Array
from trainer.data.shards import KEYS, LENGTHS_KEY, ShardSet
from trainer.data.validation import validate_file

FORM = Form(512, 80, sequences_per_row=PACKED_SEQUENCES)


def lengths_like_wikipedia(sequences: int, seed: int = 0) -> Array:
    """Like NVIDIA's shards of Wikipedia for S=512: a third are full, the others of any length (half is padding)."""
    rng = np.random.default_rng(seed)
    full = rng.random(sequences) < 0.33
    return np.where(full, 512 - rng.integers(0, 6, sequences), rng.integers(5, 512, sequences))


def packed(lengths: Array, form: Form = FORM) -> Array:
    return pack(lengths, form.masked_positions(np.arange(form.seq_len + 1)), form.row)


@pytest.mark.parametrize(
    "form",
    [
        FORM,
        dataclasses.replace(FORM, sequences_per_row=2, max_pred_len=77),
        dataclasses.replace(FORM, max_pred_len=60),  # fewer masks than two sequences of 256 have
    ],
)
@pytest.mark.parametrize("sequences", [1, 2, 3, 50, 20_000])
def test_every_sequence_is_in_one_row_and_no_row_holds_more_than_it_can(form: Form, sequences: int) -> None:
    lengths = lengths_like_wikipedia(sequences)
    rows = packed(lengths, form)
    is_sequence = rows >= 0
    assert sorted(rows[is_sequence]) == list(range(sequences))
    assert is_sequence[:, 0].all()
    assert rows.shape[1] == form.sequences_per_row
    tokens = np.where(is_sequence, lengths[rows], 0)
    masked = np.where(is_sequence, form.masked_positions(lengths[rows]), 0)
    assert tokens.sum(1).max() <= form.seq_len
    assert masked.sum(1).max() <= form.max_pred_len


@pytest.mark.slow
def test_rows_are_as_few_as_a_search_of_all_ways_finds() -> None:
    """With few sequences every assignment can be tried. Packing may need one row more than the best of them:
    best-fit decreasing needs at most 11/9 of the best and 6/9 of a row (Dósa 2007)."""
    rng = np.random.default_rng(1)
    for _ in range(30):
        lengths = rng.integers(1, 11, 6)
        limits = RowCapacity(10, 100, 6)
        ours = len(pack(lengths, np.ones(11, np.int64), limits))
        best = min(
            len(set(ways)) for ways in itertools.product(range(6), repeat=6) if max(np.bincount(ways, lengths)) <= 10
        )
        assert best <= ours <= best + 1


def test_rows_are_full_at_the_lengths_of_wikipedia() -> None:
    lengths = lengths_like_wikipedia(100_000)
    assert lengths.sum() / (512 * len(packed(lengths))) >= 0.97


def test_real_wikipedia_fills_rows(shared: Path) -> None:
    """The lengths of NVIDIA's own shards, of real articles."""
    files = sorted((shared / "fixtures" / "nvidia_hdf5" / "seq512").glob("*training*.hdf5"))
    if not files:
        pytest.skip("NVIDIA's shards for S=512 are not in the shared folder")
    shards = ShardSet.open(files[0].parent, "*training*.hdf5")
    lengths = np.concatenate(
        [shards.read(n, np.arange(rows))["input_mask"].sum(1) for n, rows in enumerate(shards.rows_per_shard)]
    )
    rows = packed(lengths.astype(np.int64))
    assert lengths.sum() / (512 * len(rows)) >= 0.97


def test_a_sequence_that_fits_no_row_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="1 sequences of 5 tokens have 3 masked positions"):
        pack(np.array([5]), np.full(11, 3), RowCapacity(10, 2, 4))


def test_packing_and_unpacking_are_inverse_and_masks_move_along() -> None:
    rng = np.random.default_rng(0)
    lengths = np.array([[3, 4, 0], [8, 0, 0], [2, 2, 3]])
    flat = lengths[lengths > 0]
    sequences = rng.integers(1, 100, (6, 8)) * (np.arange(8) < flat[:, None])
    rows = pack_tokens(sequences, lengths, 8)
    assert rows[0].tolist() == [*sequences[0, :3], *sequences[1, :4], 0]
    assert rows[2].tolist() == [*sequences[3, :2], *sequences[4, :2], *sequences[5, :3], 0]
    np.testing.assert_array_equal(unpack_tokens(rows, lengths), sequences)
    positions = np.array([[1, 2, 0], [3, 0, 0], [5, 6, 7], [1, 0, 0], [0, 0, 0], [1, 2, 0]])
    ids = np.take_along_axis(sequences, positions, 1) * (positions > 0)
    where, what = pack_masked(positions, ids, lengths)
    assert where.tolist() == [[1, 2, 3 + 3], [5, 6, 7], [1, 4 + 1, 4 + 2]]
    np.testing.assert_array_equal(what, np.take_along_axis(rows, where, 1))


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    return make_tokens(tmp_path / "tokens", documents=60)


WORDS = ("--seq-len", 64, "--max-pred-len", 10, "--short-seq-prob", 0.5, "--shards", 3)


def made(stage: Stage, tokens: Path, out: Path, *words: object) -> ShardSet:
    ran = stage("shard", "--tokens", tokens, "--out", out, *WORDS, "--processes", 1, *words)
    assert ran.returncode == 0, ran.stderr
    return ShardSet.open(out)


def sequences_of(shards: ShardSet) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """(original ids, segments, next-sentence label) of every example of a data set, with masks undone, sorted."""
    found = []
    for shard, rows in enumerate(shards.rows_per_shard):
        arrays = shards.read(shard, np.arange(rows))
        ids = arrays["input_ids"].astype(np.int64)
        chosen = arrays["masked_lm_positions"] > 0
        ids[np.nonzero(chosen)[0], arrays["masked_lm_positions"][chosen]] = arrays["masked_lm_ids"][chosen]
        lengths = arrays.get(LENGTHS_KEY, arrays["input_mask"].sum(1, keepdims=True))
        labels = arrays["next_sentence_labels"].reshape(lengths.shape)
        for row in range(rows):
            at = 0
            for length, label in zip(lengths[row].tolist(), labels[row].tolist(), strict=True):
                if length:
                    there = slice(at, at + length)
                    found.append((tuple(ids[row, there]), tuple(arrays["segment_ids"][row, there]), label))
                at += length
    return sorted(found)


def test_packed_shards_hold_the_examples_of_unpacked_ones(stage: Stage, tokens: Path, tmp_path: Path) -> None:
    apart, together = made(stage, tokens, tmp_path / "a"), made(stage, tokens, tmp_path / "b", "--pack")
    assert (apart.sequences_per_row, together.sequences_per_row) == (None, PACKED_SEQUENCES)
    assert together.rows < apart.rows
    assert sequences_of(together) == sequences_of(apart)
    manifests = [json.loads((tmp_path / name / "manifest.json").read_text())["counts"] for name in "ab"]
    training = [counts["sequences"] - counts["test_rows"] for counts in manifests]
    assert training[0] == training[1] == apart.rows
    assert manifests[1]["real_token_share"] > manifests[0]["real_token_share"]
    # Held-out data stays at one example per row, so that other tools can evaluate on it.
    assert ShardSet.open(tmp_path / "b", "*_test_*.hdf5").sequences_per_row is None


def test_each_example_has_masks_of_its_own(stage: Stage, tokens: Path, tmp_path: Path) -> None:
    shards = made(stage, tokens, tmp_path / "out", "--pack")
    form = Form(64, 10)
    for shard, rows in enumerate(shards.rows_per_shard):
        validate_file(tmp_path / "out" / shards.names[shard])
        arrays = shards.read(shard, np.arange(rows))
        ends = np.cumsum(arrays[LENGTHS_KEY], axis=1, dtype=np.int64)
        positions = arrays["masked_lm_positions"].astype(np.int64)
        for row in range(rows):
            chosen = positions[row][positions[row] > 0]
            assert (np.diff(chosen) > 0).all()
            sequence = np.searchsorted(ends[row], chosen, side="right")
            lengths = arrays[LENGTHS_KEY][row]
            there = np.bincount(sequence, minlength=len(lengths))[lengths > 0]
            assert there.tolist() == form.masked_positions(lengths[lengths > 0]).tolist()
            # Never a [CLS] or [SEP]: the first and the last token of each.
            starts = ends[row] - lengths
            assert not set(chosen) & ({*starts} | {*(ends[row] - 1)})


def test_neither_processes_nor_a_restart_show_in_packed_bytes(stage: Stage, tokens: Path, tmp_path: Path) -> None:
    made(stage, tokens, tmp_path / "a", "--pack")
    made(stage, tokens, tmp_path / "b", "--pack", "--processes", 2)
    wanted = bytes_of(tmp_path / "a")
    assert len(wanted) >= 3
    words = ("--tokens", tokens, "--out", tmp_path / "c", *WORDS, "--processes", 1, "--pack")
    killed = stage("shard", *words, FAILPOINT="rename-after:bert_training_00001.hdf5")
    assert killed.returncode == -9
    left = bytes_of(tmp_path / "c").keys()
    assert 0 < len(left) < len(wanted)
    assert left < wanted.keys()
    made(stage, tokens, tmp_path / "c", "--pack")
    for name in ("b", "c"):
        assert bytes_of(tmp_path / name) == wanted


def test_lengths_that_do_not_fit_are_refused(stage: Stage, tokens: Path, tmp_path: Path) -> None:
    from trainer.data.shards import write_shard

    shards = made(stage, tokens, tmp_path / "out", "--pack")
    arrays = shards.read(0, np.arange(int(shards.rows_per_shard[0])))
    arrays[LENGTHS_KEY][2, 0] -= 1
    write_shard(tmp_path / "bad_training_0.hdf5", arrays)
    with pytest.raises(UserError, match=r"sequence_lengths \[.*\] of row 2 do not fit its input_mask"):
        validate_file(tmp_path / "bad_training_0.hdf5")
    assert set(arrays) == {*KEYS, LENGTHS_KEY}
