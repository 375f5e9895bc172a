"""The order of samples: pure, complete, and the same for any number of workers."""

from __future__ import annotations

import numpy as np
import pytest

from common.errors import UserError
from trainer.data import order as module
from trainer.data.batch_ramp import BatchSizes
from trainer.data.order import SampleOrder, hash64


def addresses(order: SampleOrder, steps: range) -> list[tuple[int, int]]:
    return [
        (int(s), int(r)) for step in steps for s, r in zip(*(vars(order.step(step)).values()), strict=True)
    ]  # fmt: skip


def make(rows: list[int], batch: int = 7, seed: int = 3) -> SampleOrder:
    return SampleOrder(np.array(rows), seed=seed, sizes=[BatchSizes(batch)])


@pytest.mark.parametrize("block_rows", [1, 20, 1 << 18])
@pytest.mark.parametrize("rows", [[40], [13, 1, 30, 7, 22], [5] * 9])
def test_an_epoch_has_every_sample_once_but_its_tail(
    monkeypatch: pytest.MonkeyPatch, rows: list[int], block_rows: int
) -> None:
    monkeypatch.setattr(module, "BLOCK_ROWS", block_rows)
    order, steps = make(rows), sum(rows) // 7
    for epoch in range(3):
        first = epoch * steps
        seen = addresses(order, range(first, first + steps))
        assert len(set(seen)) == len(seen) == steps * 7
        assert all(row < rows[shard] for shard, row in seen)


def test_a_step_does_not_depend_on_the_steps_before() -> None:
    straight, jumping = make([50, 60]), make([50, 60])
    wanted = [addresses(straight, range(step, step + 1)) for step in range(40)]
    for step in (39, 0, 17, 17, 31):
        assert addresses(jumping, range(step, step + 1)) == wanted[step]


def test_epochs_and_seeds_differ() -> None:
    order = make([70], batch=70)
    epochs = [tuple(addresses(order, range(e, e + 1))) for e in range(4)]
    assert len(set(epochs)) == 4
    assert tuple(addresses(make([70], batch=70, seed=4), range(1))) not in epochs


def test_samples_of_a_step_come_from_few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that keeps a block's shards at hand never goes back to one it has left."""
    monkeypatch.setattr(module, "BLOCK_ROWS", 20)
    order = make([10] * 12, batch=5)
    seen = [shard for shard, _ in addresses(order, range(120 // 5))]
    last, first = {s: i for i, s in enumerate(seen)}, {}
    for i, shard in enumerate(seen):
        first.setdefault(shard, i)
    assert all(last[shard] - first[shard] < 20 for shard in first)


def test_the_shuffle_is_even() -> None:
    """Over many epochs each sample is equally likely at each position: its mean is within 4 standard errors."""
    n, epochs = 50, 400
    places = np.zeros(n)
    order = make([n], batch=n)
    for epoch in range(epochs):
        places[order.step(epoch).row] += np.arange(n)
    error = np.sqrt((n**2 - 1) / 12 / epochs)
    assert np.abs(places / epochs - (n - 1) / 2).max() < 4 * error


def test_the_order_of_shards_is_even(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for shards over many epochs, where each shard is a block."""
    monkeypatch.setattr(module, "BLOCK_ROWS", 1)
    n, epochs = 20, 400
    places = np.zeros(n)
    order = make([1] * n, batch=n)
    for epoch in range(epochs):
        places[order.step(epoch).shard] += np.arange(n)
    error = np.sqrt((n**2 - 1) / 12 / epochs)
    assert np.abs(places / epochs - (n - 1) / 2).max() < 4 * error


def test_blocks_are_shuffled_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The orders of two blocks' rows do not correlate, to within five standard errors."""
    monkeypatch.setattr(module, "BLOCK_ROWS", 1)
    n = 1000
    order = make([n, n], batch=n)
    first, second = (order.step(step).row for step in (0, 1))
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(n)


def test_the_hash_is_splitmix64() -> None:
    """First outputs of the published generator from state 1234567 (as listed by Rosetta Code)."""
    golden = 0x9E3779B97F4A7C15
    states = np.array([(1234567 + i * golden) % 2**64 for i in range(3)], dtype=np.uint64)
    assert hash64(index=states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_fewer_samples_than_a_batch_are_refused() -> None:
    with pytest.raises(UserError, match="6 samples, fewer than one global batch of 7"):
        make([2, 4])


def test_steps_read_together_are_the_steps() -> None:
    """Across the ends of epochs and blocks."""
    order = make([13, 1, 30, 7, 22])
    together, apart = order.steps(3, 25), [order.step(step) for step in range(3, 25)]
    np.testing.assert_array_equal(together.row, np.concatenate([samples.row for samples in apart]))
    np.testing.assert_array_equal(together.shard, np.concatenate([samples.shard for samples in apart]))
