"""Packed rows: the loss and the gradients equal those of the same sequences, each in its own row."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from common.errors import UserError
from stages.directory.manifest import Identity, StageDirectory
from stages.evaluation.bert import evaluate
from stages.examples.form import RowCapacity
from stages.examples.packing import pack, pack_masked, pack_tokens
from tests.helpers.support import MODEL, losses, metrics, synthetic_rows, train, write_model_config
from trainer.data.bert_batch import IGNORED, BertBatch
from trainer.data.order import Samples
from trainer.data.reader import BatchReader
from trainer.data.shards import LENGTHS_KEY, ShardSet, write_shard
from trainer.devices.cpu import CpuDevice
from trainer.devices.cpu_operations import CpuOperations
from trainer.devices.cuda_operations import CudaOperations
from trainer.models.bert import BertForPreTraining
from trainer.models.config import ModelConfig
from trainer.models.operations import Operations

S, P, K = 64, 24, 6


def write_both(directory: Path, sequences: int, *, shard: int = 0) -> tuple[Path, Path]:
    """The same sequences as a data set with one sequence a row, and as a packed one."""
    arrays = synthetic_rows(sequences, seq_len=32, max_pred_len=5, seed=shard)
    arrays = {
        key: np.pad(value, ((0, 0), (0, (S - 32) if value.shape[1] == 32 else 0))) if value.ndim == 2 else value
        for key, value in arrays.items()
    }
    lengths = arrays["input_mask"].sum(1).astype(np.int64)
    chosen = pack(lengths, np.full(S + 1, 5), RowCapacity(S, P, K))
    is_sequence, order = chosen >= 0, chosen[chosen >= 0]
    by_row = np.where(is_sequence, lengths[chosen], 0)
    wide = np.pad(arrays["masked_lm_positions"][order], ((0, 0), (0, P - 5)))
    wide_ids = np.pad(arrays["masked_lm_ids"][order], ((0, 0), (0, P - 5)))
    positions, ids = pack_masked(wide, wide_ids, by_row)
    labels = np.zeros(chosen.shape, np.uint8)
    labels[is_sequence] = arrays["next_sentence_labels"][order]
    together = {key: pack_tokens(arrays[key][order], by_row, S) for key in ("input_ids", "input_mask", "segment_ids")}
    together |= {"masked_lm_positions": positions, "masked_lm_ids": ids, "next_sentence_labels": labels}
    for name, value in (("apart", arrays), ("packed", {**together, LENGTHS_KEY: by_row.astype(np.uint16)})):
        (directory / name).mkdir(exist_ok=True)
        write_shard(directory / name / f"x_training_{shard}.hdf5", value)
    return directory / "apart", directory / "packed"


def sums_and_gradients(
    data: Path, operations: Operations, *, static: bool, without_padding: bool = False
) -> tuple[list[float], dict[str, torch.Tensor]]:
    shards = ShardSet.open(data)
    rows = np.arange(shards.rows)
    reader = BatchReader(shards, vocab_size=MODEL["vocab_size"], static_shapes=static)
    (batch,), ((masked, sequences, tokens, pairs),) = reader.micro_batches(Samples(0 * rows, rows), shards.rows)
    if without_padding:
        batch = batch.without_padding()
    model = BertForPreTraining(ModelConfig(**MODEL).without_dropout(), operations).double()
    model.initialise(seed=1)
    masked_lm, next_sentence = model(batch)
    (masked_lm / masked + next_sentence / sequences).backward()
    assert int((batch.masked_labels != IGNORED).sum()) == masked
    assert int((batch.next_sentence_labels != IGNORED).sum()) == sequences
    assert tokens <= shards.rows * S
    assert pairs <= shards.rows * S**2
    sums = [masked_lm.item(), next_sentence.item(), masked, sequences]
    return sums, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_micro_batches_have_few_sizes(tmp_path: Path) -> None:
    """Filled up to a multiple of 16, but not beyond the greatest possible number; with static shapes, up to that."""
    apart, packed = write_both(tmp_path, 41)
    for data in (apart, packed):
        shards = ShardSet.open(data)
        rows, places = np.arange(shards.rows), shards.max_pred_len
        for static in (False, True):
            reader = BatchReader(shards, vocab_size=MODEL["vocab_size"], static_shapes=static)
            batches, counts = reader.micro_batches(Samples(0 * rows, rows), 4)
            for batch, (masked, sequences, _, _) in zip(batches, counts, strict=True):
                size = len(batch.input_ids)
                for found, most, labels in (
                    (masked, size * places, batch.masked_labels),
                    (sequences, size * (K if data is packed else 1), batch.next_sentence_labels),
                ):
                    assert (labels[:found] != IGNORED).all()
                    assert (labels[found:] == IGNORED).all()
                    full = most if static else min(most, found + -found % 16)
                    assert len(labels) == full


def test_a_model_is_measured_alike_on_either(tmp_path: Path) -> None:
    model = BertForPreTraining(ModelConfig(**MODEL))
    model.initialise(seed=1)
    found = []
    for data in write_both(tmp_path, 41):
        with StageDirectory.begin(tmp_path / f"{data.name}-evaluated", lambda: Identity("evaluate", 1)) as work:
            shards = ShardSet.open(data)
            counts = evaluate(work, model, shards, device=CpuDevice(), batch_size=4, max_samples=10**6)
            found.append({name: value for name, value in counts.items() if value is not None})
    assert found[0]["samples"] == 41
    assert found[1] == pytest.approx(found[0], rel=1e-5)  # fp32


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("operations", [Operations(), CpuOperations(), CudaOperations()])
def test_loss_and_gradients_are_those_of_sequences_apart(tmp_path: Path, operations: Operations, static: bool) -> None:
    apart, packed = write_both(tmp_path, 23)
    assert ShardSet.open(packed).rows < 0.7 * 23
    expected, gradients = sums_and_gradients(apart, Operations(), static=False)
    found, ours = sums_and_gradients(packed, operations, static=static)
    assert found == pytest.approx(expected, rel=1e-12)
    assert ours.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("operations", [Operations(), CudaOperations()])
@pytest.mark.parametrize("name", ["apart", "packed"])
def test_loss_and_gradients_without_padding_are_the_same(tmp_path: Path, operations: Operations, name: str) -> None:
    data = dict(zip(("apart", "packed"), write_both(tmp_path, 23), strict=True))
    expected, gradients = sums_and_gradients(data["apart"], Operations(), static=False)
    found, ours = sums_and_gradients(data[name], operations, static=False, without_padding=True)
    assert found == pytest.approx(expected, rel=1e-12)
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(ours[parameter], gradient, rtol=1e-9, atol=1e-12, msg=parameter)


def test_without_padding_the_tokens_are_those_of_the_sequences(tmp_path: Path) -> None:
    """In their order; what fills the row up is at most a 32nd of the rows, in runs no longer than a row; and what is
    counted is what is computed."""
    for data in write_both(tmp_path, 41):
        shards = ShardSet.open(data)
        rows = np.arange(shards.rows)
        reader = BatchReader(shards, vocab_size=MODEL["vocab_size"], without_padding=True)
        (batch,), ((_, sequences, tokens, pairs),) = reader.micro_batches(Samples(0 * rows, rows), shards.rows)
        bare = batch.without_padding()
        is_real = batch.sequence_ids > 0
        assert tokens == int(is_real.sum())
        assert bare.input_ids.shape[0] == 1
        assert tokens <= bare.input_ids.shape[1] <= tokens + max(16, shards.rows * S // 32)
        assert torch.equal(bare.input_ids[0, :tokens], batch.input_ids[is_real])
        assert torch.equal(bare.position_ids[0, :tokens], batch.position_ids.expand_as(is_real)[is_real])
        used = batch.masked_labels != IGNORED
        assert int(bare.masked_index[used].max()) < tokens
        masked = batch.input_ids.flatten()[batch.masked_index[used]]
        assert torch.equal(bare.input_ids[0][bare.masked_index[used]], masked)
        lengths = bare.cu_seqlens.diff()
        assert lengths.max() <= bare.max_seqlen == S
        assert lengths.min() > 0
        assert int(bare.cu_seqlens[-1]) == bare.input_ids.shape[1]
        assert int(bare.cu_seqlens[sequences]) == tokens
        assert pairs == int((lengths[:sequences] ** 2).sum())
        assert torch.equal(torch.bincount(bare.sequence_ids[0, :tokens])[1:], lengths[:sequences])


def test_without_padding_what_fills_up_is_in_runs_no_longer_than_a_row() -> None:
    """A kernel leaves undefined what lies beyond the maximum length it is given; 33 tokens are filled up to 64."""
    rows, length = 64, 16
    ids = torch.zeros(rows, length, dtype=torch.int64)
    ids[:2] = 1
    ids[2, 0] = 1
    one = torch.zeros(1, dtype=torch.int64)
    batch = BertBatch(ids, ids, ids, torch.arange(length)[None], one, one, None, None).without_padding()
    assert batch.input_ids.shape == (1, 64)
    assert batch.cu_seqlens.tolist() == [0, 16, 32, 33, 49, 64]
    assert batch.max_seqlen == length


def test_masked_tokens_in_padding_stay_in_padding(tmp_path: Path) -> None:
    """In faulty data, which the plateau doctor warns about: they are not taken for another token."""
    data, _ = write_both(tmp_path, 8)
    shards = ShardSet.open(data)
    (batch,), _ = BatchReader(shards, vocab_size=MODEL["vocab_size"]).micro_batches(
        Samples(np.zeros(8, int), np.arange(8)), 8
    )
    batch.masked_index[0] = S - 1
    assert batch.sequence_ids[0, S - 1] == 0
    bare = batch.without_padding()
    assert bare.sequence_ids[0, bare.masked_index[0]] == 0
    assert (bare.sequence_ids[0, bare.masked_index[1:]] > 0).all()


def test_tokens_after_padding_and_rows_without_tokens_are_refused(tmp_path: Path) -> None:
    """Attention on a GPU is told only where the sequences end."""
    data, _ = write_both(tmp_path, 8)
    shards = ShardSet.open(data)
    (path,) = data.glob("*.hdf5")
    with h5py.File(path, "r+") as file:
        file["input_mask"][3, 1] = 0
    reader = BatchReader(shards, vocab_size=MODEL["vocab_size"])
    with pytest.raises(UserError, match=r"input_mask of row 3 has tokens after padding; allowed: 1 for all tokens"):
        reader.read(Samples(np.zeros(8, int), np.arange(8)))
    with h5py.File(path, "r+") as file:
        file["input_mask"][3] = 0
    with pytest.raises(UserError, match=r"input_mask of row 3 has no tokens; allowed: 1 for all tokens"):
        reader.read(Samples(np.zeros(8, int), np.arange(8)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own warnings while it traces
@pytest.mark.parametrize("name", ["apart", "packed"])
def test_one_graph_computes_micro_batches_of_other_lengths_on_a_gpu(tmp_path: Path, name: str) -> None:
    """The whole model, forward and backward, traced as for a GPU: with static shapes nothing is retraced, and
    the losses are those of the untraced model."""
    data = dict(zip(("apart", "packed"), write_both(tmp_path, 24), strict=True))[name]
    shards = ShardSet.open(data)
    reader = BatchReader(shards, vocab_size=MODEL["vocab_size"], static_shapes=True)
    rows = np.arange(shards.rows // 2 * 2)
    batches, _ = reader.micro_batches(Samples(0 * rows, rows), len(rows) // 2)
    model = BertForPreTraining(ModelConfig(**MODEL).without_dropout(), CudaOperations()).double()
    model.initialise(seed=1)
    traced = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    call = torch.compile(model, backend=traced, fullgraph=True, dynamic=False)
    assert len(batches) == 2
    for batch in batches:
        found, expected = sum(call(batch)), sum(model(batch))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        ours, theirs = (torch.autograd.grad(loss, list(model.parameters())) for loss in (found, expected))
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    assert traced.frame_count == 1


@pytest.mark.slow
@pytest.mark.usefixtures("torch_xla")
def test_packed_rows_train_alike_however_they_are_computed(tmp_path: Path) -> None:
    """One worker, two, two that share the model, XLA (with static shapes, and no graphs after the first two)."""
    for shard in (0, 1):
        _, packed = write_both(tmp_path, 60, shard=shard)
    ways = {
        "one": (1, {}), "two": (2, {}), "shared": (2, {"tensor_parallel_size": 2}), "xla": (1, {"device": "xla"}),
    }  # fmt: skip
    for name, (workers, changes) in ways.items():
        given = {
            "device": "cpu", "data_dir": packed, "output_dir": tmp_path / name, "precision": "fp64",
            "model_config": write_model_config(tmp_path), "max_pred_len": P, "batch_size": 4, "max_steps": 4,
            "grad_accum_usteps": 2 if name == "two" else 4, "warmup_steps": 1, "disable_dropout": True, "lr": 1e-3,
        }  # fmt: skip
        done = train(workers, **{**given, **changes})
        assert done.returncode == 0, done.stdout
    for name in ways:
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "one"), rel=1e-8)
    assert metrics(tmp_path / "xla")[-1]["compiled_graphs"] == 2
    # The 16 rows of a step hold more sequences than rows, and all of them count.
    assert metrics(tmp_path / "one")[0]["throughput"] * metrics(tmp_path / "one")[0]["step_time_s"] > 20
