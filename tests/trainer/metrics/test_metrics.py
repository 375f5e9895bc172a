"""Rates and utilization: torch counts the floating-point operations, and the records' own times give the rates."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.helpers.known_peak import PEAK_FLOPS_PER_S
from tests.helpers.small_language import trainer_here
from tests.helpers.support import MODEL, VOCAB, Workers, metrics, options
from tests.trainer.data.test_packed import write_both
from trainer.data.loader import Step
from trainer.data.order import Samples
from trainer.data.reader import BatchReader
from trainer.data.shards import ShardSet, write_shard
from trainer.devices.cpu_operations import CpuOperations
from trainer.models.bert import BertForPreTraining
from trainer.models.config import ModelConfig
from trainer.state import TrainState
from trainer.workloads.bert import BertWorkload

ROWS, S, P = 8, 32, 4
#: No two sizes alike, so that none can be mistaken for another.
CONFIG = ModelConfig(
    vocab_size=VOCAB, num_hidden_layers=3, hidden_size=24, num_attention_heads=4, intermediate_size=72,
    max_position_embeddings=S,
)  # fmt: skip


@pytest.fixture
def shards(tmp_path: Path) -> ShardSet:
    """Rows without padding, all of whose P positions are used: nothing is filled up."""
    rng = np.random.default_rng(0)
    arrays = {
        "input_ids": rng.integers(5, VOCAB, (ROWS, S)),
        "input_mask": np.ones((ROWS, S)),
        "segment_ids": np.zeros((ROWS, S)),
        "masked_lm_positions": np.tile(np.arange(1, P + 1), (ROWS, 1)),
        "masked_lm_ids": rng.integers(5, VOCAB, (ROWS, P)),
        "next_sentence_labels": rng.integers(0, 2, ROWS),
    }
    small = {"input_ids": np.uint16, "masked_lm_positions": np.uint16, "masked_lm_ids": np.uint16}
    write_shard(tmp_path / "x_training_0.hdf5", {k: v.astype(small.get(k, np.uint8)) for k, v in arrays.items()})
    return ShardSet.open(tmp_path)


@pytest.mark.parametrize("sampled", [0, 20])
def test_floating_point_operations_are_those_that_torch_counts(shards: ShardSet, sampled: int) -> None:
    """Our count for our model, the usual formula's for Hugging Face's, which computes its head at every token."""
    transformers = pytest.importorskip("transformers")
    rows = np.arange(ROWS)
    (batch,), (counts,) = BatchReader(shards, vocab_size=VOCAB).micro_batches(Samples(0 * rows, rows), ROWS)
    work = BertWorkload(CONFIG, shards, sampled_softmax=sampled).work(counts, 1)
    # With dropout, since torch does not count fused attention.
    ours = BertForPreTraining(CONFIG, CpuOperations(), sampled_softmax=sampled)
    ours.initialise(seed=1)
    with FlopCounterMode(display=False) as counted:
        sum(ours.train()(batch)).backward()
    assert work.flops == counted.get_total_flops()

    config = transformers.BertConfig(**CONFIG.to_hugging_face(), attn_implementation="eager")
    theirs = transformers.BertForPreTraining(config).train()
    labels = torch.full((ROWS, S), 7)
    with FlopCounterMode(display=False) as counted:
        theirs(batch.input_ids, labels=labels, next_sentence_label=batch.next_sentence_labels).loss.backward()
    assert work.usual_flops == counted.get_total_flops()
    assert work.samples == ROWS


def test_packed_rows_count_what_their_sequences_are(tmp_path: Path) -> None:
    """Each sequence's own tokens and pairs of them, whichever row it shares."""
    apart, packed = (ShardSet.open(path) for path in write_both(tmp_path, 41))
    lengths = apart.read(0, np.arange(41))["input_mask"].sum(1).astype(int)
    masked = int((apart.read(0, np.arange(41))["masked_lm_positions"] > 0).sum())
    rows = np.arange(packed.rows)
    _, counts = BatchReader(packed, vocab_size=VOCAB).micro_batches(Samples(0 * rows, rows), 4)
    assert np.sum(counts, axis=0).tolist() == [masked, 41, lengths.sum(), (lengths**2).sum()]


@pytest.fixture(scope="module")
def out(data: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a training of 14 steps by two workers, 16 sequences a step."""
    out = tmp_path_factory.mktemp("out")
    words = options(
        data_dir=data, model_config=model, output_dir=out, precision="fp32", device="cpu", max_steps=14,
        batch_size=4, grad_accum_usteps=2, warmup_steps=2, max_pred_len=5, record_samples=True,
    )  # fmt: skip
    done = Workers(2, "tests.helpers.known_peak", words, {}).wait()
    assert done.returncode == 0, done.stdout
    return out


@pytest.fixture(scope="module")
def records(out: Path) -> list[dict[str, Any]]:
    return metrics(out)


def flops_of_steps(out: Path, data: Path) -> list[int]:
    """Of the rows that all workers recorded, with their padding, as the CPU computes them: 6 for each weight that a
    token, a prediction or a sequence meets, and 12 h for each pair of tokens in a layer."""
    files = [h5py.File(path) for path in sorted(data.glob("*.hdf5"))]
    layers, h, inner = (MODEL[name] for name in ("num_hidden_layers", "hidden_size", "intermediate_size"))
    after = h * h + 2 * h * inner  # after the last attention only what is used
    found = [0] * 14
    for worker in range(2):
        for line in (out / f"samples-{worker}.jsonl").read_text().splitlines():
            record = json.loads(line)
            for shard, row in record["samples"]:
                tokens = len(files[shard]["input_mask"][row])
                predictions = int((files[shard]["masked_lm_positions"][row] > 0).sum())
                found[record["step"]] += (
                    6 * tokens * (layers * (4 * h * h + 2 * h * inner) - after)
                    + 6 * (predictions + 1) * after
                    + 12 * tokens**2 * layers * h
                    + 6 * predictions * (h * h + h * MODEL["vocab_size"])
                    + 6 * (h * h + 2 * h)
                )
    return found


def test_rates_are_those_of_the_latest_ten_steps(out: Path, data: Path, records: list[dict[str, Any]]) -> None:
    """Work over time, not a mean of rates."""
    flops = flops_of_steps(out, data)
    for at in range(14):
        recent = slice(max(0, at - 9), at + 1)
        seconds = sum(record["step_time_s"] for record in records[recent])
        assert records[at]["throughput"] == pytest.approx(16 * len(records[recent]) / seconds, rel=1e-9)
        assert records[at]["flops_per_s"] * seconds == pytest.approx(sum(flops[recent]), rel=1e-9)


def test_utilization_is_that_of_all_workers_devices(records: list[dict[str, Any]]) -> None:
    for record in records:
        assert record["mfu"] == pytest.approx(record["flops_per_s"] / (2 * PEAK_FLOPS_PER_S), rel=1e-9)
        # The head at 32 positions a sequence instead of at most 5.
        assert record["mfu_usual"] > 1.1 * record["mfu"]


def test_waits_are_recorded_with_the_step_that_they_delayed(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The eighth batch comes 100 s late, and copying the checkpoint after the fourth step takes as long, on a clock of
    the test's own: on the machine's, another step may be the slowest."""
    now = [0.0]

    def monotonic() -> float:
        now[0] += 1e-3
        return now[0]

    given = {"vocab_size": VOCAB, "micro_batch_size": 4, "warmup_steps": 1, "ckpt_interval_steps": 4}
    trainer, _ = trainer_here(data, tmp_path, steps=12, **given)
    save = trainer.checkpointer.save

    def late(first: int, last: int) -> Iterator[Step]:
        for step in range(first, last):
            now[0] += 100 * (step == 7)
            yield from trainer.dataloader.load(step, step + 1)

    def slow(state: TrainState) -> None:
        now[0] += 100 * (state.step == 4)
        save(state)

    clock = SimpleNamespace(**{**vars(time), "monotonic": monotonic})
    monkeypatch.setattr("trainer.metrics.metrics.time", clock)
    monkeypatch.setattr(trainer.dataloader, "steps", late)
    monkeypatch.setattr(trainer.checkpointer, "save", slow)
    assert trainer.train()
    for name, step in (("data_wait_s", 8), ("checkpoint_stall_s", 5)):
        assert [record["step"] for record in metrics(tmp_path) if record[name] > 50] == [step]
