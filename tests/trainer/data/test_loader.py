"""Which worker gets which samples, and that a batch holds the rows that its samples' addresses name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.support import VOCAB
from trainer.data.batch import Batch
from trainer.data.batch_ramp import BatchSizes
from trainer.data.loader import Loader
from trainer.data.order import SampleOrder, Samples
from trainer.data.reader import BatchReader
from trainer.data.shards import ShardSet

Addresses = list[tuple[int, int]]


class NoData:
    """Reads nothing: the test looks only at a step's addresses."""

    rows_at_once = 1

    def micro_batches(
        self, samples: Samples, size: int, *, step: int, epoch: int
    ) -> tuple[Sequence[Batch], Sequence[tuple[int, ...]]]:
        count = len(samples) // size
        return [Batch()] * count, [(size,)] * count


def addresses(samples: Samples) -> Addresses:
    return list(zip(samples.shard.tolist(), samples.row.tolist(), strict=True))


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_number_of_workers_does_not_change_what_shares_a_micro_batch(workers: int) -> None:
    """A step's global batch in pieces of 3, dealt out in turn."""
    order = SampleOrder(np.array([50, 60, 30]), seed=5, sizes=[BatchSizes(24)])
    loaders = [
        Loader(NoData(), order, micro_batch_size=3, rank=rank, size=workers) for rank in range(workers)
    ]  # fmt: skip
    for step in (0, 4, 9):
        whole = addresses(order.step(step))
        mine = [addresses(loader.load(step, step + 1)[0].samples) for loader in loaders]
        dealt: Addresses = []
        for start in range(0, 24 // workers, 3):
            for rank in range(workers):
                dealt += mine[rank][start : start + 3]
        assert dealt == whole


def test_a_batch_holds_the_rows_of_its_samples_in_their_order(data: Path) -> None:
    """From several shards, read together; compared with the rows read one by one."""
    shards = ShardSet.open(data)
    rng = np.random.default_rng(0)
    shard = rng.integers(0, 4, 12)
    row = rng.integers(0, shards.rows_per_shard[shard])
    batches, counts = BatchReader(shards, vocab_size=VOCAB).micro_batches(Samples(shard, row), 4)
    for at in range(12):
        batch, within = batches[at // 4], at % 4
        arrays = shards.read(int(shard[at]), row[at : at + 1])
        for name, key in (("input_ids", "input_ids"), ("segment_ids", "segment_ids"), ("sequence_ids", "input_mask")):
            assert torch.equal(getattr(batch, name)[within], torch.from_numpy(arrays[key][0].astype(np.int64)))
        assert batch.next_sentence_labels[within] == int(arrays["next_sentence_labels"][0])
        used = arrays["masked_lm_positions"][0] > 0
        here = (batch.masked_index // 32 == within) & (batch.masked_labels >= 0)
        assert batch.masked_index[here].tolist() == (32 * within + arrays["masked_lm_positions"][0][used]).tolist()
        assert batch.masked_labels[here].tolist() == arrays["masked_lm_ids"][0][used].tolist()
    assert [count[:2] for count in counts] == [(int((b.masked_labels >= 0).sum()), 4) for b in batches]
