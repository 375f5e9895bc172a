"""Training without next-sentence prediction: a BertForMaskedLM, from shards with or without labels."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.support import (
    MODEL,
    assert_one_line_error,
    assert_resumed,
    assert_same_bytes,
    forked,
    metrics,
    synthetic_rows,
    tensors,
    train,
)
from trainer.data.shards import NEXT_SENTENCE_KEY, ShardSet, write_shard
from trainer.models.config import ModelConfig
from trainer.workloads.bert import BertWorkload

HEAD = ("bert.pooler.", "cls.seq_relationship.")
COMMON: dict[str, Any] = {
    "batch_size": 4, "lr": 3e-3, "warmup_steps": 2, "max_pred_len": 5, "ckpt_interval_steps": 0, "device": "cpu",
    "no-next_sentence": True, "precision": "fp64", "disable_dropout": True, "max_steps": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rows of `data`, without labels."""
    directory = tmp_path_factory.mktemp("alone")
    for shard, rows in enumerate([37, 40, 23, 31]):
        arrays = synthetic_rows(rows, seq_len=32, max_pred_len=5, seed=shard)
        del arrays[NEXT_SENTENCE_KEY]
        write_shard(directory / f"synthetic_training_{shard}.hdf5", arrays)
    return directory


def run(data: Path, model: Path, out: Path, workers: int = 1, **values: Any) -> Path:
    """16 sequences a step whatever the layout."""
    size = values.get("tensor_parallel_size", 1)
    given = {**COMMON, "grad_accum_usteps": 4 * size // workers, **values}
    done = train(workers, data_dir=data, model_config=model, output_dir=out, **given)
    assert done.returncode == 0, done.stdout
    assert_resumed(done, values)
    return out


def refused(data: Path, model: Path, out: Path, *text: str, **values: Any) -> None:
    done = train(1, data_dir=data, model_config=model, output_dir=out, **{**COMMON, "grad_accum_usteps": 4, **values})
    assert_one_line_error(done, *text)


def test_labels_that_are_not_used_change_nothing(data: Path, alone: Path, model: Path, tmp_path: Path) -> None:
    without, ignored = run(alone, model, tmp_path / "without"), run(data, model, tmp_path / "ignored")
    names = ("loss", "masked_lm_loss", "grad_norm")
    curves = [[[record[name] for name in names] for record in metrics(out)] for out in (without, ignored)]
    assert curves[0] == curves[1]
    assert all(record["loss"] == record["masked_lm_loss"] for record in metrics(without))
    assert not any("next_sentence_loss" in record for record in metrics(ignored))
    found, other = (tensors(out / "checkpoints" / "ckpt_8") for out in (without, ignored))
    assert not [name for name in found if any(head in name for head in HEAD)]
    assert found.keys() == other.keys()
    assert all(np.array_equal(found[name], other[name]) for name in found)


@pytest.mark.parametrize(
    ("workers", "size", "data_parallel"), [(2, 1, "allreduce"), (2, 1, "ddp"), (2, 2, "allreduce"), (4, 2, "allreduce")]
)
def test_every_layout_trains_the_same_model(
    alone: Path, model: Path, tmp_path: Path, workers: int, size: int, data_parallel: str
) -> None:
    one = metrics(run(alone, model, tmp_path / "one"))
    many = run(alone, model, tmp_path / "many", workers, tensor_parallel_size=size, data_parallel=data_parallel)
    for name in ("loss", "grad_norm"):
        # float64: sums in another order.
        np.testing.assert_allclose([r[name] for r in metrics(many)], [r[name] for r in one], rtol=1e-8)


@pytest.mark.parametrize("optimizer", ["Muon", "LAMB"])
def test_an_interrupted_run_ends_with_the_same_bytes(alone: Path, model: Path, tmp_path: Path, optimizer: str) -> None:
    values = {"precision": "autocast", "disable_dropout": False, "max_steps": 11, "optimizer": optimizer}
    straight = run(alone, model, tmp_path / "straight", **values)
    cut = run(alone, model, tmp_path / "cut", steps_this_run=6, **values)
    run(alone, model, cut, resume_ckpt=True, **values)
    assert_same_bytes(cut / "checkpoints" / "ckpt_11", straight / "checkpoints" / "ckpt_11")


def test_shards_without_labels_are_no_food_for_a_head(data: Path, alone: Path, model: Path, tmp_path: Path) -> None:
    refused(
        alone, model, tmp_path / "out", f"{alone} have no next_sentence_labels", "--no-next_sentence",
        **{"no-next_sentence": False},
    )  # fmt: skip
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    for path in (data / "synthetic_training_0.hdf5", alone / "synthetic_training_1.hdf5"):
        (mixed / path.name).write_bytes(path.read_bytes())
    done = train(1, data_dir=mixed, model_config=model, output_dir=tmp_path / "b", **COMMON, grad_accum_usteps=4)
    assert done.returncode == 1
    assert "synthetic_training_1.hdf5 lacks next_sentence_labels, unlike synthetic_training_0.hdf5" in done.stdout


@pytest.mark.parametrize("is_phase2", [False, True])
def test_a_checkpoint_of_the_other_objective_is_refused(
    data: Path, model: Path, tmp_path: Path, is_phase2: bool
) -> None:
    runs = {
        without: run(data, model, tmp_path / str(without), **{"no-next_sentence": without}) for without in (True, False)
    }
    for without, made in runs.items():
        values: dict[str, Any] = {"no-next_sentence": not without, "resume_ckpt": True, "max_steps": 9}
        if is_phase2:
            values |= {"phase2": True, "phase1_end_step": 8, "resume_ckpt_path": made / "checkpoints" / "ckpt_8"}
        out = tmp_path / f"{without}-2" if is_phase2 else made
        refused(data, model, out, f"its next_sentence is {not without}, this run's is {without}", **values)


def test_the_work_of_a_step_is_that_of_the_model_without_the_head(data: Path) -> None:
    config, shards = ModelConfig(**MODEL), ShardSet.open(data)
    masked_lm = dataclasses.replace(config, next_sentence=False)
    counts = (20, 8, 8 * 32, 8 * 32**2)
    both, one = (BertWorkload(model, shards).work(counts, 1) for model in (config, masked_lm))
    # Per sequence: the pooler's and the classifier's matrices, times two for a multiply-add and three for the backward.
    h = config.hidden_size
    head = 8 * 3 * 2 * (h**2 + 2 * h)
    # And what the last layer does for the head after its attention.
    last = 8 * 3 * 2 * (h**2 + 2 * h * config.intermediate_size)
    assert (both.flops - one.flops, both.usual_flops - one.usual_flops) == (head + last, head)
    assert both.samples == one.samples


def test_phase_2_continues_phase_1_and_the_merged_model_is_a_bert_for_masked_lm(
    alone: Path, model: Path, tmp_path: Path
) -> None:
    """Two ranks in phase 1, converted to one, which is trained further, split again and merged."""
    transformers = pytest.importorskip("transformers")
    first = run(alone, model, tmp_path / "first", 2, tensor_parallel_size=2, precision="fp32")
    done = forked("stages.convert", first / "checkpoints" / "ckpt_8", tmp_path / "whole")
    assert done.returncode == 0, done.stdout
    second = run(
        alone, model, tmp_path / "second", precision="fp32", phase2=True, phase1_end_step=8, resume_ckpt=True,
        resume_ckpt_path=tmp_path / "whole" / "checkpoint",
    )  # fmt: skip
    assert metrics(second)[0]["loss"] < metrics(first)[0]["loss"]
    checkpoint = second / "checkpoints" / "ckpt_16"
    assert forked("stages.convert", checkpoint, tmp_path / "split", "--tensor-parallel-size", 4).returncode == 0
    done = forked("stages.merge", tmp_path / "split" / "checkpoint", tmp_path / "merged")
    assert done.returncode == 0, done.stdout
    merged = tmp_path / "merged" / "model"
    config = json.loads((merged / "config.json").read_text())
    assert config["architectures"] == ["BertForMaskedLM"]
    assert "next_sentence" not in config
    loaded, info = transformers.BertForMaskedLM.from_pretrained(merged, output_loading_info=True)
    assert not any(info.values()), info
    expected = tensors(checkpoint)
    assert {name for name, _ in loaded.named_parameters()} == {n for n in expected if not n.startswith(("exp_", "mom"))}
    for name, parameter in loaded.named_parameters():
        np.testing.assert_array_equal(parameter.detach().numpy(), expected[name], err_msg=name)
    # The files themselves say what model it is: the directory is read without any other option.
    assert forked("stages.convert", merged, tmp_path / "back").returncode == 0
    back = tensors(tmp_path / "back" / "checkpoint")
    assert all(np.array_equal(back[name], expected[name]) for name in back)
    done = forked("stages.convert", merged, tmp_path / "pt", "--to", "pt", "--step", "16")
    assert_one_line_error(done, "BertForMaskedLM", "the script trains a BertForPreTraining only", "--to hf")
