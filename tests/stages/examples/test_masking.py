"""How masked tokens are drawn, compared with the rules of Devlin et al. 2018, section 3.1, by statistics alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from stages.examples.form import Form
from stages.examples.pairs import PAIR, Vocabulary, complete_rows, gather_rows
from tests.conftest import Stage
from tests.helpers.chance import assert_flat, assert_mean_zero, assert_uncorrelated
from tests.helpers.corpora import make_tokens

Array = np.ndarray[Any, Any]
#: Special ids that are not the first ones, and so few ordinary ones that a table can hold all pairs.
SIZE, SPECIAL = 60, (0, 17, 23, 31, 59)
CLS, SEP, MASK = 17, 23, 31
ORDINARY = np.setdiff1d(np.arange(SIZE), SPECIAL)


def assert_replacements(before: Array, after: Array, ordinary: Array, mask: int) -> None:
    """Masked tokens, (M,), became [MASK], a random ordinary token, or themselves, in shares of 0.8, 0.1, 0.1.

    A random token equals the old one in 1 of len(`ordinary`) cases.
    """
    same = 1 / len(ordinary)
    shares = {"mask": 0.8, "kept": 0.1 * (1 + same), "replaced": 0.1 * (1 - same)}
    replaced = (after != mask) & (after != before)
    seen = {"mask": after == mask, "kept": after == before, "replaced": replaced}
    for name, share in shares.items():
        assert_mean_zero([seen[name] - share], share * (1 - share), names=[name])
    assert np.isin(after[replaced], ordinary).all()


@pytest.mark.parametrize("whole_word_mask", [False, True])
def test_replacements_are_any_ordinary_token_whatever_was_there(whole_word_mask: bool) -> None:
    """Chi-square over the vocabulary, over all pairs of old and new, and over positions in the row."""
    vocabulary = Vocabulary(SIZE, CLS, SEP, MASK, ORDINARY, np.arange(SIZE) % 4 == 1)
    rng = np.random.default_rng(5)
    tokens = rng.choice(ORDINARY, 300_000).astype(np.uint16)
    pairs = np.zeros(40_000, PAIR)
    pairs["a_length"], pairs["b_length"] = 30, 31
    pairs["a_start"], pairs["b_start"] = rng.integers(0, len(tokens) - 31, (2, len(pairs)))
    form = Form(64, 10, whole_word_mask=whole_word_mask)
    rows = gather_rows(tokens, pairs, vocabulary, form.seq_len)
    untouched = rows.copy()
    arrays = complete_rows(rows, pairs, form, vocabulary, rng=np.random.default_rng(6))
    row, slot = np.nonzero(arrays["masked_lm_positions"])
    place = arrays["masked_lm_positions"][row, slot]
    before, after = untouched[row, place], arrays["input_ids"][row, place]
    np.testing.assert_array_equal(arrays["masked_lm_ids"][row, slot], before)
    assert len(before) > 300_000
    assert_replacements(before, after, ORDINARY, MASK)

    replaced = (after != MASK) & (after != before)
    was, now = (np.searchsorted(ORDINARY, ids[replaced]) for ids in (before, after))
    n = len(ORDINARY)
    assert_flat(np.bincount(now, minlength=n))
    # Old and new are never the same here: n - 1 steps from one to the other, around the vocabulary.
    assert_flat(np.bincount((now - was) % n, minlength=n)[1:])
    table = np.bincount(was * n + now, minlength=n * n).reshape(n, n)
    assert_flat(table[~np.eye(n, dtype=bool)])
    assert_flat(np.bincount(place[replaced], minlength=64)[1:31])
    # Fates of neighbouring slots of a row are independent: about 0.1 of a slot's neighbours are replaced, too.
    replaced_slots = np.zeros(arrays["masked_lm_positions"].shape)
    replaced_slots[row, slot] = replaced - replaced.mean()
    full = (arrays["masked_lm_positions"] > 0).all(axis=1)
    share = replaced.mean()
    assert full.sum() > 10_000
    columns = [f"slot {number}" for number in range(10)]
    assert_uncorrelated(replaced_slots[full].T, share * (1 - share), names=columns)


def test_written_shards_have_the_papers_masks(tmp_path: Path, stage: Stage) -> None:
    """The real command: shares, replacements from the whole vocabulary, and different masks in each shard."""
    tokens = make_tokens(tmp_path / "tokens", documents=400)
    made = tmp_path / "shards"
    given = ("--seq-len", 64, "--max-pred-len", 10, "--shards", 6, "--dupe-factor", 10)
    ran = stage("shard", "--tokens", tokens, "--out", made, *given)
    assert ran.returncode == 0, ran.stderr
    befores, afters, masks, chances = [], [], [], []
    for path in sorted(made.glob("*_training_*.hdf5")):
        with h5py.File(path) as file:
            ids, positions, labels = (file[key][:] for key in ("input_ids", "masked_lm_positions", "masked_lm_ids"))
            first, second = (file["input_mask"][:], file["segment_ids"][:])
        row, slot = np.nonzero(positions)
        befores.append(labels[row, slot])
        afters.append(ids[row, positions[row, slot]])
        is_masked = np.zeros(ids.shape)
        is_masked[row, positions[row, slot]] = 1
        # [CLS] and the two [SEP], one before the segment changes and one before the padding, are never masked.
        may_be = (first > 0) & (np.arange(64) > 0) & (np.diff(second, axis=1, append=0) == 0)
        may_be &= np.diff(first, axis=1, append=0) == 0
        chance = may_be * (is_masked.sum(axis=1) / may_be.sum(axis=1))[:, None]
        assert not is_masked[~may_be].any()
        masks.append(is_masked - chance)
        chances.append(chance * (1 - chance))
    rows = min(map(len, masks))
    residuals, variances = ([part[:rows].reshape(-1) for part in parts] for parts in (masks, chances))
    assert_uncorrelated(residuals, variances, names=[f"shard {number}" for number in range(6)])
    before, after = np.concatenate(befores), np.concatenate(afters)
    ordinary = np.arange(5, 120)
    assert_replacements(before, after, ordinary, 4)
    replaced = (after != 4) & (after != before)
    # Old tokens are not uniform, so new ones are not quite: a new token that equals the old one is left out here.
    weight = 1 - np.bincount(before, minlength=120)[5:] / len(before)
    seen, expected = np.bincount(after[replaced], minlength=120)[5:], replaced.sum() * weight / weight.sum()
    assert ((seen - expected) ** 2 / expected).sum() < 115 + 5 * np.sqrt(2 * 115)
    assert seen.min() > 0
