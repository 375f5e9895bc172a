"""Masks drawn when examples are read: their distribution, their independence, and what they depend on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from common.errors import UserError
from tests.helpers.support import options
from trainer.build import build_dataloader, mask_rate_steps
from trainer.config import TrainConfig
from trainer.data import masking
from trainer.data.batch_ramp import BatchSizes
from trainer.data.bert_batch import IGNORED
from trainer.data.identity import content_identity
from trainer.data.loader import Loader
from trainer.data.mask_rate import MaskRate
from trainer.data.masking import DynamicMasking, Masking
from trainer.data.order import SampleOrder, Samples, hash64
from trainer.data.reader import BatchReader
from trainer.data.shards import LENGTHS_KEY, MASKED_KEYS, ShardSet, write_shard
from trainer.data.vocabulary import SPECIAL_TOKENS, Vocabulary
from trainer.devices.cpu import CpuDevice
from trainer.options import parse, to_config
from trainer.parallel.mesh import Mesh
from trainer.resume import initial_state, resolve_precision
from trainer.run import Run

S, WORDS = 64, 995
#: Every fourth piece continues a word.
PIECES = [*SPECIAL_TOKENS, *(f"##p{n}" if n % 4 == 3 else f"w{n}" for n in range(WORDS))]
VOCABULARY = Vocabulary.of(PIECES)
CLS, SEP = VOCABULARY.cls, VOCABULARY.sep


def write(directory: Path, rows: int, *, packed: bool = False, shards: int = 2) -> ShardSet:
    """Rows of random words, [CLS] a [SEP] b [SEP], of varied length; if packed, two of up to half a row each."""
    directory.mkdir()
    rng = np.random.default_rng(1)
    for shard in range(shards):
        ids = rng.integers(5, len(PIECES), (rows, S), np.uint16)
        mask, segments = np.zeros((rows, S), np.uint8), np.zeros((rows, S), np.uint8)
        lengths = rng.integers(S // 4, S // 2, (rows, 2)) if packed else rng.integers(S // 2, S + 1, (rows, 1))
        lengths = np.concatenate([lengths, np.zeros((rows, 1), np.int64)], axis=1) if packed else lengths
        for row in range(rows):
            at = 0
            for length in lengths[row][lengths[row] > 0]:
                ids[row, [at, at + length // 2, at + length - 1]] = CLS, SEP, SEP
                segments[row, at + length // 2 + 1 : at + length] = 1
                at += length
            mask[row, :at] = 1
            ids[row, at:] = 0
        labels = np.zeros(lengths.shape if packed else rows, np.uint8)
        arrays = {"input_ids": ids, "input_mask": mask, "segment_ids": segments, "next_sentence_labels": labels}
        if packed:
            arrays[LENGTHS_KEY] = lengths.astype(np.uint16)
        write_shard(directory / f"x_training_{shard}.hdf5", arrays)
    return ShardSet.open(directory)


def reader(shards: ShardSet, rate: MaskRate = MaskRate(), **options: object) -> BatchReader:  # noqa: B008 (immutable)
    static_shapes = bool(options.pop("static_shapes", False))
    masking = Masking(rate, whole_words=bool(options.pop("whole_words", False)))
    masks = DynamicMasking(masking, VOCABULARY, **{"seed": 7, "falling": range(1), **options})  # type: ignore[arg-type]
    return BatchReader(shards, vocab_size=len(PIECES), static_shapes=static_shapes, dynamic_masking=masks)


def all_rows(shards: ShardSet) -> Samples:
    numbers = np.arange(shards.rows)
    return Samples(*np.divmod(numbers, shards.rows_per_shard[0]))


def read(reader: BatchReader, samples: Samples, **at: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, labels (`IGNORED` where there are none) and which tokens are masked, of one micro-batch; each (rows, S)."""
    (batch,), ((masked, *_),) = reader.micro_batches(samples, len(samples), **at)
    labels = np.full(batch.input_ids.numel(), IGNORED)
    labels[batch.masked_index[:masked]] = batch.masked_labels[:masked]
    assert (batch.masked_labels[masked:] == IGNORED).all()
    return batch.input_ids.numpy(), labels.reshape(batch.input_ids.shape), labels.reshape(batch.input_ids.shape) >= 0


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> ShardSet:
    return write(tmp_path_factory.mktemp("masking") / "data", 2000)


def chi_square_is_ordinary(counts: np.ndarray, expected: np.ndarray) -> bool:
    """Whether counts fit these expectations: within 5 standard deviations of chi-square, k ± √2k."""
    k = counts.size - 1
    return abs(((counts - expected) ** 2 / expected).sum() - k) < 5 * (2 * k) ** 0.5


@pytest.mark.parametrize("share", [0.15, 0.4])
def test_masks_have_berts_distribution(shards: ShardSet, share: float) -> None:
    ids, labels, masked = read(reader(shards, MaskRate(share, share)), all_rows(shards))
    original = np.concatenate([shards.read(n, np.arange(2000))["input_ids"] for n in range(2)])
    real = np.concatenate([shards.read(n, np.arange(2000))["input_mask"] for n in range(2)]) > 0
    # Tokens not chosen are unchanged; chosen ones have the original as their label; special tokens are never chosen.
    np.testing.assert_array_equal(ids[~masked], original[~masked])
    np.testing.assert_array_equal(labels[masked], original[masked])
    candidates = real & (original != CLS) & (original != SEP)
    assert not (masked & ~candidates).any()
    wanted = np.maximum(1, np.round(real.sum(1) * share))
    np.testing.assert_array_equal(masked.sum(1), wanted)
    # Uniform: each position is chosen as often as its candidates imply.
    chance = candidates * (wanted / candidates.sum(1))[:, None]
    assert chi_square_is_ordinary(masked.sum(0)[1:-1], chance.sum(0)[1:-1])
    n = masked.sum()
    is_mask, kept = ids[masked] == VOCABULARY.mask, ids[masked] == original[masked]
    for found, expected in ((is_mask.mean(), 0.8), (kept.mean(), 0.1 + 0.1 / WORDS)):
        assert abs(found - expected) < 5 * (expected * (1 - expected) / n) ** 0.5
    others = ids[masked][~is_mask & ~kept]
    assert others.min() >= len(SPECIAL_TOKENS)
    assert chi_square_is_ordinary(
        np.bincount(others, minlength=len(PIECES))[5:], np.full(WORDS, len(others) / WORDS)
    )  # fmt: skip


@pytest.mark.parametrize("change", [{"epoch": 1}, {"seed": 8}])
def test_other_epochs_and_seeds_have_independent_masks(shards: ShardSet, change: dict[str, int]) -> None:
    """Two draws of a share p agree on p of the positions, and on what replaces a token as often as by chance."""
    samples = all_rows(shards)
    ids, _, one = read(reader(shards), samples, epoch=0)
    seed = {"seed": change["seed"]} if "seed" in change else {}
    others, _, two = read(reader(shards, **seed), samples, epoch=change.get("epoch", 0))
    both = one & two
    share = one.sum() / (len(samples) * (0.75 * S - 3))
    assert abs(both.sum() / one.sum() - share) < 0.02
    assert abs(((ids == VOCABULARY.mask) & both).sum() / both.sum() - 0.8) < 5 * (0.16 / both.sum()) ** 0.5
    same_fate = ((ids == VOCABULARY.mask) == (others == VOCABULARY.mask))[both].mean()
    assert abs(same_fate - (0.8**2 + 0.2**2)) < 5 * (0.22 / both.sum()) ** 0.5


def test_neighbours_have_independent_masks(shards: ShardSet) -> None:
    """Adjacent rows, and adjacent positions of a row, correlate no more than by chance."""
    _, _, masked = read(reader(shards), all_rows(shards))
    inner = masked[:, 1 : S // 4].astype(float)  # always candidates
    for one, two in ((inner[:-1], inner[1:]), (inner[:, :-1], inner[:, 1:])):
        correlation = np.corrcoef(one.reshape(-1), two.reshape(-1))[0, 1]
        # Drawing without replacement makes the positions of a row repel each other by 1 / (candidates - 1).
        assert abs(correlation) < 5 / one.size**0.5 + (1 / (S / 2 - 4) if one.shape == inner[:, 1:].shape else 0)


def test_rows_of_different_shards_have_independent_masks(shards: ShardSet) -> None:
    """Rows with the same number in two shards agree as often as by chance."""
    _, _, masked = read(reader(shards), all_rows(shards))
    one, two = masked[:2000, 1 : S // 4].astype(float), masked[2000:, 1 : S // 4].astype(float)
    assert abs(np.corrcoef(one.reshape(-1), two.reshape(-1))[0, 1]) < 5 / one.size**0.5


def test_a_mask_depends_on_the_sample_and_not_on_its_batch(shards: ShardSet) -> None:
    samples = all_rows(shards)
    _, labels, _ = read(reader(shards), samples, epoch=3)
    some = np.array([7, 3999, 2001, 12])
    _, mine, _ = read(reader(shards), samples[some], epoch=3)
    np.testing.assert_array_equal(mine, labels[some])


def test_not_even_the_longest_row_of_a_batch_decides_a_mask(shards: ShardSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws of 8 bits, which often tie, and the last bit that a row's width leaves to them or not: were it the longest
    row's, batches of rows that fill half of it would use one bit more."""
    few = np.uint64(0xFF << 56 | 1 << 37)
    monkeypatch.setattr(masking, "hash64", lambda *words, **more: hash64(*words, **more) & few)
    samples = all_rows(shards)
    real = np.concatenate([shards.read(n, np.arange(2000))["input_mask"] for n in range(2)]).sum(axis=1)
    short = np.flatnonzero(real == S // 2)
    assert len(short) > 50
    _, labels, _ = read(reader(shards), samples)
    _, mine, _ = read(reader(shards), samples[short])
    np.testing.assert_array_equal(mine, labels[short])


def test_workers_and_micro_batches_see_the_same_masks(shards: ShardSet) -> None:
    order = SampleOrder(shards.rows_per_shard, seed=1, sizes=[BatchSizes(16)])

    def chosen(size: int, micro_batch: int) -> dict[tuple[int, int], list[int]]:
        found: dict[tuple[int, int], list[int]] = {}
        for rank in range(size):
            loader = Loader(reader(shards), order, micro_batch_size=micro_batch, rank=rank, size=size)
            for step in loader.steps(249, 251):  # across the end of an epoch of 250 steps
                at = 0
                for batch in step.micro_batches:
                    for row, ids in enumerate(batch.input_ids.tolist()):
                        where = int(step.samples.shard[at + row]), int(step.samples.row[at + row])
                        found[step.index, *where] = ids
                    at += len(batch.input_ids)
        return found

    one = chosen(1, 16)
    assert len(one) == 32
    assert chosen(2, 4) == chosen(4, 2) == one


def test_a_run_masks_as_its_options_say(tmp_path: Path) -> None:
    """From the command's words to the batches: the rate falls over the phase; epochs and seeds have masks of their own;
    words are masked whole."""
    rows, steps = 160, 100
    shards = write(tmp_path / "data", rows // 2)
    (tmp_path / "data" / "vocab.txt").write_text("\n".join(PIECES))

    def masks(*words: str, seed: int = 7) -> dict[tuple[int, int], np.ndarray]:
        """(step, row of the data set) → which of its tokens are masked."""
        given = options(
            data_dir=tmp_path / "data", output_dir=tmp_path / "out", model="tiny", vocab_size=len(PIECES), device="cpu",
            batch_size=16, grad_accum_usteps=1, max_steps=steps, warmup_steps=1, seed=seed, precision="fp32",
        )  # fmt: skip
        config, workload = to_config(parse([*given, *words]), Mesh())
        run = Run(config, workload, CpuDevice(threads=1), Mesh(), print)
        precision = resolve_precision(run, None)
        loader = build_dataloader(run, precision, initial_state(run, None, precision, []), None)
        found = {}
        for step in loader.steps(0, steps):
            (batch,) = step.micro_batches
            masked = np.zeros(16 * S, bool)
            real = batch.masked_labels.numpy() != IGNORED
            masked[batch.masked_index.numpy()[real]] = True
            where = step.samples.shard * (rows // 2) + step.samples.row
            found |= {(step.index, int(row)): one for row, one in zip(where, masked.reshape(16, S), strict=True)}
        return found

    tokens = np.concatenate([shards.read(n, np.arange(rows // 2))["input_ids"] for n in range(2)])
    falling = masks("--masked_lm_prob", "0.3", "--final_masked_lm_prob", "0.15", "--whole_word_mask")

    def share(at: range) -> float:
        some = [(row, masked) for (step, row), masked in falling.items() if step in at]
        return float(sum(masked.sum() for _, masked in some) / sum((tokens[row] != 0).sum() for row, _ in some))

    # Counts are rounded, to tokens and to whole words: by less than one of about 14, and of about 7.
    assert share(range(10)) == pytest.approx(0.2925, abs=0.2925 / 14)
    assert share(range(90, 100)) == pytest.approx(0.1575, abs=0.1575 / 7)
    continues = VOCABULARY.continues[tokens] & (np.roll(tokens, 1, axis=1) >= len(SPECIAL_TOKENS))
    continues[:, 0] = False
    assert all((one[1:] == one[:-1])[continues[row][1:]].all() for (_, row), one in falling.items())

    def overlap(first: dict[tuple[int, int], np.ndarray], second: dict[tuple[int, int], np.ndarray]) -> float:
        """The share of the first epoch's masked tokens that are masked in the second epoch, or by the other run."""
        mine = {row: one for (step, row), one in first.items() if step < 10}
        epoch = range(10, 20) if second is first else range(10)
        others = {row: one for (step, row), one in second.items() if step in epoch}
        assert mine.keys() == others.keys() == set(range(rows))
        return float(sum((mine[row] & others[row]).sum() for row in mine) / sum(one.sum() for one in mine.values()))

    # 15 % of 160 rows: about 400 masked tokens, so five standard errors of a share of 0.17 are 0.09.
    plain = masks("--masked_lm_prob", "0.15")
    assert overlap(plain, plain) == pytest.approx(0.16, abs=0.09)
    assert overlap(plain, masks("--masked_lm_prob", "0.15", seed=8)) == pytest.approx(0.16, abs=0.09)
    assert overlap(plain, masks("--masked_lm_prob", "0.15")) == 1


def test_the_rate_goes_linearly_over_the_phase(shards: ShardSet) -> None:
    rate, samples = MaskRate(0.3, 0.15), all_rows(shards)
    masks = reader(shards, rate, falling=range(101))
    tokens = sum(shards.read(n, np.arange(2000))["input_mask"].sum() for n in range(2))
    for step, share in ((0, 0.3), (50, 0.225), (100, 0.15)):
        _, _, masked = read(masks, samples, step=step)
        assert masked.sum() / tokens == pytest.approx(share, abs=0.002)  # each row's count is rounded


def test_the_rate_of_a_stable_schedule_falls_in_the_decay_alone() -> None:
    """So that a longer training has the same masks up to the decay."""

    def rates(**given: object) -> list[float]:
        falling = mask_rate_steps(TrainConfig(max_steps=10, warmup_steps=2, decay_share=0.4, **given))  # type: ignore[arg-type]
        return [MaskRate(0.3, 0.15).at(step, falling) for step in range(10)]

    assert rates(schedule="wsd") == pytest.approx([*[0.3] * 7, 0.25, 0.2, 0.15])
    assert rates(schedule="constant") == [0.3] * 10
    assert rates(schedule="linear") == pytest.approx(list(np.linspace(0.3, 0.15, 10)))


def test_packed_sequences_are_masked_each_by_itself(tmp_path: Path) -> None:
    packed = write(tmp_path / "packed", 500, packed=True)
    samples = all_rows(packed)
    for static_shapes in (False, True):
        (batch,), (counts,) = reader(packed, MaskRate(0.2, 0.2), static_shapes=static_shapes).micro_batches(
            samples, len(samples)
        )
        labels = batch.masked_labels.numpy()
        sequences = batch.sequence_ids.numpy().reshape(-1)[batch.masked_index[labels >= 0]]
        row = batch.masked_index.numpy()[labels >= 0] // S
        lengths = np.concatenate([packed.read(n, np.arange(500))[LENGTHS_KEY] for n in range(2)]).astype(int)
        for slot in range(2):
            found = np.bincount(row[sequences == slot + 1], minlength=1000)
            np.testing.assert_array_equal(found, np.maximum(1, np.round(lengths[:, slot] * 0.2)))
        assert counts[0] == (labels >= 0).sum()
        if static_shapes:
            assert len(labels) == 1000 * (int(S * 0.2) + 3)


def test_packed_sequences_of_a_row_are_masked_independently(tmp_path: Path) -> None:
    """Two equal sequences in each of 4,000 rows: neither the places nor what stands there depend on each other."""
    rows, length, rng = 4000, S // 2, np.random.default_rng(3)
    one = rng.integers(5, len(PIECES), (rows, length), np.uint16)
    one[:, 0], one[:, length // 2], one[:, -1] = CLS, SEP, SEP
    ids, zeros = np.concatenate([one, one], axis=1), np.zeros((rows, S), np.uint8)
    (tmp_path / "data").mkdir()
    arrays = {"input_ids": ids, "input_mask": zeros + 1, "segment_ids": zeros}
    arrays |= {"next_sentence_labels": zeros[:, :2], LENGTHS_KEY: np.full((rows, 2), length, np.uint16)}
    write_shard(tmp_path / "data" / "x_training_0.hdf5", arrays)
    packed = ShardSet.open(tmp_path / "data")
    after, _, masked = read(reader(packed, MaskRate(0.2, 0.2)), all_rows(packed))
    first, second = masked[:, :length], masked[:, length:]
    inner = np.r_[1 : length // 2, length // 2 + 1 : length - 1]
    assert (first[:, inner] != second[:, inner]).any(axis=1).mean() > 0.99
    found = np.corrcoef(first[:, inner].ravel(), second[:, inner].ravel())[0, 1]
    assert abs(found) < 5 / np.sqrt(rows * len(inner))
    both = first & second
    is_mask = after == VOCABULARY.mask
    agree = (is_mask[:, :length] == is_mask[:, length:])[both]
    assert len(agree) > 2000
    assert abs(agree.mean() - (0.8**2 + 0.2**2)) < 5 * np.sqrt(0.68 * 0.32 / len(agree))


def test_whole_words_are_masked_together(shards: ShardSet) -> None:
    _, labels, masked = read(reader(shards, MaskRate(0.3, 0.3), whole_words=True), all_rows(shards))
    original = np.concatenate([shards.read(n, np.arange(2000))["input_ids"] for n in range(2)])
    continues = VOCABULARY.continues[original] & (np.roll(original, 1, axis=1) >= len(SPECIAL_TOKENS))
    continues[:, 0] = False
    assert (masked[:, 1:] == masked[:, :-1])[continues[:, 1:]].all()
    tokens = sum(shards.read(n, np.arange(2000))["input_mask"].sum() for n in range(2))
    assert 0.27 < masked.sum() / tokens <= 0.31


def test_shards_without_masks_need_their_own_vocabulary(tmp_path: Path, shards: ShardSet) -> None:
    assert not set(MASKED_KEYS) & set(shards.keys)
    with pytest.raises(UserError, match=r"vocab.txt has 1000 entries, the model 999; use the model"):
        BatchReader(
            shards, vocab_size=999, dynamic_masking=DynamicMasking(Masking(), VOCABULARY, seed=7, falling=range(1))
        )


def test_a_missing_vocabulary_is_one_line(tmp_path: Path) -> None:
    """As of shards that were copied without it. It is part of what identifies their data set."""
    with pytest.raises(UserError, match=r"cannot read .*vocab.txt: No such file or directory; check the path"):
        content_identity(tmp_path, ["vocab.txt"], tmp_path)


def test_an_id_that_the_vocabulary_lacks_is_one_line(shards: ShardSet) -> None:
    """Although the model's vocabulary, which may be padded, has it."""
    masks = DynamicMasking(Masking(whole_words=True), Vocabulary.of(PIECES[:-500]), seed=1, falling=range(1))
    foreign = BatchReader(shards, vocab_size=len(PIECES), dynamic_masking=masks)
    limit = len(PIECES) - 500
    with pytest.raises(
        UserError, match=rf"input_ids of row \d+ holds id \d+, but the data set's vocabulary has {limit};"
    ):
        foreign.micro_batches(all_rows(shards), 4)
