"""Training through the real command: workers, interruptions and phases change nothing that they should not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.support import (
    Workers,
    assert_one_line_error,
    assert_resumed,
    assert_same_bytes,
    forked,
    losses,
    metrics,
    options,
    synthetic_rows,
    tensors,
    train,
    write_dataset,
    write_model_config,
)
from trainer.data.batch_ramp import BatchSizes
from trainer.data.loader import Loader
from trainer.data.order import SampleOrder
from trainer.data.reader import BatchReader
from trainer.data.shards import ShardSet, write_shard
from trainer.models.bert import BertForPreTraining
from trainer.models.config import ModelConfig

STEPS = 50
COMMON = {
    "batch_size": 4,
    "lr": 3e-3,
    "warmup_steps": 5,
    "max_pred_len": 5,
    "device": "cpu",
    "num_ckpts_to_keep": -1,
    "ckpt_interval_steps": 0,
}


def run(data: Path, model: Path, out: Path, *, workers: int = 1, status: int = 0, **values: object) -> Path:
    """Train with 16 sequences a step whatever the number of workers."""
    given = {"grad_accum_usteps": 4 // workers, "precision": "fp32", "max_steps": STEPS, **COMMON, **values}
    done = train(workers, data_dir=data, model_config=model, output_dir=out, **given)
    assert done.returncode == status, done.stdout + done.stderr
    assert_resumed(done, values)
    return out


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-8), ("fp32", 1e-4)])
def test_workers_do_not_change_the_loss_curve(
    data: Path, model: Path, tmp_path: Path, precision: str, tolerance: float
) -> None:
    """The same algorithm: sums in another order differ only by rounding, which grows over 50 steps."""
    curves = {
        workers: losses(
            run(data, model, tmp_path / str(workers), workers=workers, precision=precision, disable_dropout=True)
        )
        for workers in (1, 2, 4)
    }
    assert len(curves[1]) == STEPS
    assert curves[1][-1] < curves[1][0]
    for workers in (2, 4):
        np.testing.assert_allclose(curves[workers], curves[1], rtol=tolerance)


def test_the_micro_batch_does_not_change_the_loss_curve(data: Path, model: Path, tmp_path: Path) -> None:
    """Losses weigh every token of the global batch alike, however it is split."""
    small = run(data, model, tmp_path / "small", precision="fp64", disable_dropout=True, max_steps=10)
    whole = run(
        data, model, tmp_path / "whole", precision="fp64", disable_dropout=True, max_steps=10,
        batch_size=16, grad_accum_usteps=1,
    )  # fmt: skip
    np.testing.assert_allclose(losses(whole), losses(small), rtol=1e-8)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "autocast"])
def test_an_interrupted_run_ends_with_the_same_bytes(
    data: Path, model: Path, tmp_path: Path, workers: int, precision: str
) -> None:
    """With dropout; the cut is in the second epoch (an epoch has 8 steps of 16 in 131 samples)."""
    values = {"workers": workers, "precision": precision, "max_steps": 14}
    straight = run(data, model, tmp_path / "straight", **values)
    cut = run(data, model, tmp_path / "cut", steps_this_run=9, **values)
    run(data, model, cut, resume_ckpt=True, **values)
    assert_same_bytes(cut / "checkpoints" / "ckpt_14", straight / "checkpoints" / "ckpt_14")
    same = ("step", "epoch", "samples", "loss", "learning_rate", "grad_norm")
    records = [[{key: record[key] for key in same} for record in metrics(out)] for out in (straight, cut)]
    assert records[0] == records[1]


def test_steps_after_the_checkpoint_are_done_again_and_recorded_once(data: Path, model: Path, tmp_path: Path) -> None:
    straight = run(data, model, tmp_path / "straight", max_steps=9)
    lost = run(data, model, tmp_path / "lost", max_steps=9, ckpt_interval_steps=4)
    shutil.rmtree(lost / "checkpoints" / "ckpt_9")
    shutil.rmtree(lost / "checkpoints" / "ckpt_8")
    run(data, model, lost, max_steps=9, resume_ckpt=True)
    assert [record["step"] for record in metrics(lost)] == list(range(1, 10))
    assert losses(lost) == losses(straight)


def test_phase_2_starts_from_phase_1_and_resumes_with_its_own_state(data: Path, model: Path, tmp_path: Path) -> None:
    first = run(data, model, tmp_path / "phase1", max_steps=6) / "checkpoints" / "ckpt_6"
    longer = write_dataset(tmp_path / "data2", [60], seq_len=64, max_pred_len=9)
    values = {
        "phase2": True, "resume_ckpt": True, "resume_ckpt_path": first, "phase1_end_step": 6, "max_steps": 5,
        "max_pred_len": 9, "warmup_steps": 2, "lr": 1e-3,
    }  # fmt: skip
    straight = run(longer, model, tmp_path / "straight", **values)
    cut = run(longer, model, tmp_path / "cut", steps_this_run=3, **values)
    run(longer, model, cut, **values)
    assert [record["step"] for record in metrics(cut)] == [7, 8, 9, 10, 11]
    # A fresh schedule: phase 2's own warm-up from 0 to its peak after 2 steps, then down to 0 at step 5.
    rates = [record["learning_rate"] for record in metrics(cut)]
    np.testing.assert_allclose(rates, [0, 5e-4, 1e-3, 2e-3 / 3, 1e-3 / 3], rtol=1e-12)
    assert_same_bytes(cut / "checkpoints" / "ckpt_11", straight / "checkpoints" / "ckpt_11")


def test_phase_2_begins_with_the_loss_of_phase_1s_weights(data: Path, model: Path, tmp_path: Path) -> None:
    first = run(data, model, tmp_path / "phase1", max_steps=40) / "checkpoints" / "ckpt_40"
    second = run(data, model, tmp_path / "phase2", phase2=True, resume_ckpt=True, resume_ckpt_path=first,
                 phase1_end_step=40, max_steps=1, warmup_steps=0, disable_dropout=True)  # fmt: skip
    network = BertForPreTraining(ModelConfig.of_hugging_face(json.loads(model.read_text())))
    network.load_state_dict({name: torch.from_numpy(tensors(first)[name]) for name, _ in network.named_parameters()})
    shards = ShardSet.open(data)
    order = SampleOrder(shards.rows_per_shard, seed=12349, sizes=[BatchSizes(16)])
    (step,) = Loader(BatchReader(shards, vocab_size=200), order, micro_batch_size=16).load(0, 1)
    masked_lm, next_sentence = network.eval()(step.micro_batches[0])
    expected = (masked_lm / step.counts[0] + next_sentence / 16).item()
    assert losses(second)[0] == pytest.approx(expected, rel=1e-5)  # fp32 sums in another order
    assert expected < losses(tmp_path / "phase1")[0] - 0.05


def test_a_minimal_checkpoint_ends_a_phase_that_can_be_interrupted(data: Path, model: Path, tmp_path: Path) -> None:
    """Whatever stops the phase, the same command continues it; at its end there are the weights, and phase 2 begins."""
    out, given = tmp_path / "out", {**COMMON, "data_dir": data, "model_config": model, "grad_accum_usteps": 4}
    given |= {"precision": "fp32", "max_steps": 6, "resume_ckpt": True}
    words = {"output_dir": out, "minimal_ckpt": True, **given}
    stopped = train(env={"FAILPOINT": "step:4.0", "FAILPOINT_ACTION": "terminate"}, **words)
    assert stopped.returncode == 75, stopped.stdout
    assert "the same command with --resume_ckpt continues" in stopped.stdout
    done = train(**words)
    assert done.returncode == 0, done.stdout
    assert "resuming from" in done.stdout
    assert "ckpt_4" in done.stdout
    again = train(**words)
    assert again.returncode == 0, again.stdout
    whole = run(data, model, tmp_path / "whole", max_steps=6)
    files = {path.name for path in (out / "checkpoints" / "ckpt_6").iterdir()}
    assert files == {path.name for path in (whole / "checkpoints" / "ckpt_6").iterdir()} - {
        "optimizer-00-of-01.safetensors"
    }
    refused = train(**{**words, "max_steps": 10})
    assert refused.returncode == 1, refused.stdout

    phase2 = {"phase2": True, "phase1_end_step": 6, "resume_ckpt": True, "max_steps": 6}
    for directory in (out, whole):
        run(data, model, directory, **phase2)
    ours, theirs = (tensors(directory / "checkpoints" / "ckpt_12") for directory in (out, whole))
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name], tensor, err_msg=name)


def test_old_checkpoints_go_and_the_newest_stay(data: Path, model: Path, tmp_path: Path) -> None:
    out = run(data, model, tmp_path, max_steps=9, ckpt_interval_steps=2, num_ckpts_to_keep=2)
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["ckpt_8", "ckpt_9"]


def test_a_trial_of_a_resumed_run_writes_nothing(data: Path, model: Path, tmp_path: Path) -> None:
    """As the variable of AWS's compilers makes of the command that resumes; not all of the data is read for it."""
    out = run(data, model, tmp_path / "out", max_steps=6, steps_this_run=2)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    run(data, model, out, max_steps=6, trial=True, resume_ckpt=True, record_samples=True)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_the_root_chooses_the_precision_of_all(data: Path, model: Path, tmp_path: Path) -> None:
    """Machines may differ. The same bytes as with the precision named."""
    given = {**COMMON, "data_dir": data, "model_config": model, "max_steps": 5, "grad_accum_usteps": 2}
    words = options(**{**given, "device": "cpu", "precision": "auto", "output_dir": tmp_path / "auto"})
    done = Workers(2, "tests.helpers.faulty.devices", ["UnlikeTheRoots", *words], {}).wait()
    assert done.returncode == 0, done.stdout
    assert train(2, **{**given, "precision": "autocast", "output_dir": tmp_path / "named"}).returncode == 0
    assert_same_bytes(*(tmp_path / name / "checkpoints" / "ckpt_5" for name in ("auto", "named")))


def test_bad_input_is_one_line(data: Path, model: Path, tmp_path: Path) -> None:
    def refused(*fragments: str, workers: int = 1, **values: object) -> None:
        given = {**COMMON, "data_dir": data, "model_config": model, "output_dir": tmp_path / "out", **values}
        assert_one_line_error(train(workers, **given), *fragments)

    refused("no-such", data_dir=tmp_path / "no-such")
    refused("131 samples", "global batch of 256")
    refused("--optimizer is Adam", "AdamW", "LAMB", optimizer="Adam")
    refused("phase 2 starts from phase 1's checkpoint of step 7", phase2=True, resume_ckpt=True, phase1_end_step=7,
            grad_accum_usteps=1)  # fmt: skip
    refused("no checkpoint", resume_ckpt=True, resume_ckpt_path=tmp_path / "ckpt_3", grad_accum_usteps=1)
    refused("sequences of 32 tokens; 128 were asked for", seq_len=128, grad_accum_usteps=1)


def test_ids_outside_the_vocabulary_are_named(model: Path, tmp_path: Path) -> None:
    arrays = synthetic_rows(20, seq_len=32, max_pred_len=5, seed=0)
    arrays["input_ids"][13, 1] = 201
    (tmp_path / "data").mkdir()
    write_shard(tmp_path / "data" / "x_training_0.hdf5", arrays)
    done = train(
        data_dir=tmp_path / "data", model_config=model, output_dir=tmp_path / "out", max_steps=9, grad_accum_usteps=2,
        **{**COMMON, "warmup_steps": 0},
    )  # fmt: skip
    assert_one_line_error(done, "x_training_0.hdf5", "input_ids", "row 13", "201", "200")


@pytest.mark.parametrize(
    ("key", "value"),
    [("masked_lm_positions", 32), ("segment_ids", 2), ("input_mask", 3), ("next_sentence_labels", 2),
     ("masked_lm_positions", -1), ("input_ids", -5)],
)  # fmt: skip
def test_values_the_model_cannot_take_are_named(model: Path, tmp_path: Path, key: str, value: int) -> None:
    """By training and by evaluation, which do not check whole files; in files of ours and of signed types."""
    arrays = synthetic_rows(20, seq_len=32, max_pred_len=5, seed=0)
    if value < 0:
        arrays = {name: array.astype(np.int32) for name, array in arrays.items()}
    arrays[key].reshape(20, -1)[13, -1] = value
    data = tmp_path / "data"
    data.mkdir()
    for kind in ("training", "test"):
        write_shard(data / f"x_{kind}_0.hdf5", arrays)
    out = tmp_path / "out"
    given = {**COMMON, "data_dir": data, "model_config": model, "output_dir": out, "warmup_steps": 0}
    done = train(max_steps=9, grad_accum_usteps=2, **given)
    assert_one_line_error(done, "x_training_0.hdf5", key, "row 13", str(value))
    write_dataset(tmp_path / "good", [20])
    assert train(max_steps=1, grad_accum_usteps=2, **{**given, "data_dir": tmp_path / "good"}).returncode == 0
    assert forked("stages.merge", out / "checkpoints" / "ckpt_1", tmp_path / "merged").returncode == 0
    done = forked("stages.evaluate", tmp_path / "merged" / "model", data, "--out", tmp_path / "evaluation")
    assert_one_line_error(done, "x_test_0.hdf5", key, "row 13", str(value))


def test_a_checkpoint_of_another_model_or_run_is_refused(data: Path, model: Path, tmp_path: Path) -> None:
    out = run(data, model, tmp_path / "out", max_steps=2, warmup_steps=0)
    other = write_model_config(tmp_path, num_hidden_layers=1)
    common = {**COMMON, "data_dir": data, "output_dir": out, "max_steps": 4, "grad_accum_usteps": 4, "warmup_steps": 0}
    resumed = {**common, "resume_ckpt": True, "precision": "fp32"}
    assert_one_line_error(train(model_config=other, **resumed), "num_hidden_layers", "2", "1")
    assert_one_line_error(train(model_config=model, **{**resumed, "grad_accum_usteps": 2}), "global_batch_size", "16")
    assert_one_line_error(train(model_config=model, **{**resumed, "seed": 1}), "seed", "12349")
    assert_one_line_error(train(model_config=model, **common), "add --resume_ckpt")
    assert len(metrics(out)) == 2


def test_a_diverging_run_stops_and_keeps_its_last_good_checkpoint(data: Path, model: Path, tmp_path: Path) -> None:
    done = train(
        **{**COMMON, "warmup_steps": 0, "lr": 1e30, "ckpt_interval_steps": 1},
        data_dir=data, model_config=model, output_dir=tmp_path, max_steps=9, grad_accum_usteps=4, precision="fp32",
    )  # fmt: skip
    assert_one_line_error(done, "step 2", "learning rate 8.889e+29", "nan")
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["ckpt_1"]
    assert len(metrics(tmp_path)) == 1


def recorded(out: Path, workers: int) -> dict[int, list[list[int]]]:
    """The samples of each global step, in the order of the global batch: micro-step by micro-step, worker by worker."""
    steps: dict[int, list[list[int]]] = {}
    per_worker = []
    for rank in range(workers):
        lines = (out / f"samples-{rank}.jsonl").read_text().splitlines()
        per_worker.append({record["step"]: record["samples"] for record in map(json.loads, lines)})
    for step in per_worker[0]:
        shares = [np.array(worker[step]).reshape(-1, 4, 2) for worker in per_worker]
        steps[step] = np.stack(shares, axis=1).reshape(-1, 2).tolist()
    return steps


@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-8), ("fp32", 1e-4)])
def test_the_number_of_workers_may_change_between_runs(
    data: Path, model: Path, tmp_path: Path, precision: str, tolerance: float
) -> None:
    """4 workers, then 2, then 4 see the samples that 1 worker sees, in the same steps."""
    values = {"precision": precision, "disable_dropout": True, "record_samples": True, "max_steps": 15}
    straight = run(data, model, tmp_path / "straight", **values)
    seen: dict[int, list[list[int]]] = {}
    out = tmp_path / "changing"
    for workers, stop in ((4, 5), (2, 11), (4, 15)):
        run(data, model, out, workers=workers, steps_this_run=stop, resume_ckpt=stop > 5, **values)
        seen |= recorded(out, workers)
        for path in out.glob("samples-*.jsonl"):
            path.unlink()
    assert seen == recorded(straight, 1)
    assert sorted(seen) == list(range(15))
    np.testing.assert_allclose(losses(out), losses(straight), rtol=tolerance)


@pytest.mark.parametrize(("steps", "said"), [(-5, "--steps_this_run is -5"), (0, "which trains nothing")])
def test_steps_that_are_none_are_one_line(data: Path, model: Path, tmp_path: Path, steps: int, said: str) -> None:
    done = train(data_dir=data, model_config=model, output_dir=tmp_path / "out", max_pred_len=5, steps_this_run=steps)
    assert_one_line_error(done, said)
    assert not (tmp_path / "out").exists()
