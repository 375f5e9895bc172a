"""Ranks that share a model train the same model as one rank alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.support import (
    assert_one_line_error,
    assert_resumed,
    assert_same_bytes,
    flip_a_byte,
    forked,
    metrics,
    tensors,
    train,
    write_model_config,
)
from trainer.devices.cpu import CpuDevice
from trainer.models.bert import BertForPreTraining
from trainer.models.config import ModelConfig
from trainer.parallel.tensor import TensorParallel

#: (workers, ranks that share a model)
LAYOUTS = ((1, 1), (2, 2), (4, 4), (4, 2))
COMMON = {
    "batch_size": 4, "lr": 3e-3, "warmup_steps": 5, "max_pred_len": 5, "ckpt_interval_steps": 0, "device": "cpu",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary size that no number of ranks divides: it is padded."""
    return write_model_config(tmp_path_factory.mktemp("model"), vocab_size=203)


def run(data: Path, model: Path, out: Path, layout: tuple[int, int], *, status: int = 0, **values: object) -> Path:
    """16 sequences a step whatever the layout."""
    workers, size = layout
    env = values.pop("env", None)
    given = {"grad_accum_usteps": 4 * size // workers, "tensor_parallel_size": size, **COMMON, **values}
    assert env is None or isinstance(env, dict)
    done = train(workers, data_dir=data, model_config=model, output_dir=out, env=env, **given)
    assert done.returncode == status, done.stdout
    assert_resumed(done, values)
    return out


@pytest.mark.slow
def test_losses_and_gradient_norms_are_those_of_one_rank(data: Path, model: Path, tmp_path: Path) -> None:
    """Sums in another order differ only by rounding, which grows over 20 steps."""
    given = {"precision": "fp64", "disable_dropout": True, "max_steps": 20}
    curves = {}
    for layout in LAYOUTS:
        records = metrics(run(data, model, tmp_path / str(layout), layout, **given))
        curves[layout] = [
            (record["masked_lm_loss"], record["next_sentence_loss"], record["grad_norm"]) for record in records
        ]
    assert curves[1, 1][-1][0] < curves[1, 1][0][0]
    for layout in LAYOUTS[1:]:
        np.testing.assert_allclose(curves[layout], curves[1, 1], rtol=1e-8, err_msg=str(layout))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["LAMB", "Muon"])
def test_an_optimizer_of_whole_matrices_updates_them_as_one_rank_does(
    data: Path, model: Path, tmp_path: Path, optimizer: str
) -> None:
    given = {"precision": "fp64", "disable_dropout": True, "max_steps": 12, "optimizer": optimizer, "lr": 0.02}
    curves = {
        layout: [record["loss"] for record in metrics(run(data, model, tmp_path / str(layout), layout, **given))]
        for layout in ((1, 1), (2, 2), (4, 2))
    }
    assert curves[1, 1][-1] < curves[1, 1][0]
    for layout in ((2, 2), (4, 2)):
        np.testing.assert_allclose(curves[layout], curves[1, 1], rtol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["AdamW", "Muon"])
def test_a_joined_checkpoint_is_that_of_one_rank_and_goes_on_with_any_number(
    data: Path, model: Path, tmp_path: Path, optimizer: str
) -> None:
    """Two ranks for 6 steps, converted, then four ranks to the end: as one rank alone, in float64."""
    given = {"precision": "fp64", "disable_dropout": True, "max_steps": 10, "optimizer": optimizer}
    alone = run(data, model, tmp_path / "alone", (1, 1), **given, ckpt_interval_steps=6, num_ckpts_to_keep=-1)
    two = run(data, model, tmp_path / "two", (2, 2), **given, steps_this_run=6)
    split = two / "checkpoints" / "ckpt_6"
    assert sorted(path.name for path in split.iterdir()) == [
        "manifest.json", "model-00-of-02.safetensors", "model-01-of-02.safetensors", "optimizer-00-of-02.safetensors",
        "optimizer-01-of-02.safetensors", "state.json",
    ]  # fmt: skip
    assert forked("stages.convert", split, tmp_path / "joined", "--config", model).returncode == 0
    joined, expected = tensors(tmp_path / "joined" / "checkpoint"), tensors(alone / "checkpoints" / "ckpt_6")
    assert joined.keys() == expected.keys()
    for name, tensor in expected.items():
        # Adam divides by roots of squares, so a parameter may be off by more than its gradient.
        np.testing.assert_allclose(joined[name], tensor, rtol=1e-8, atol=1e-12, err_msg=name)

    refused = train(
        4, data_dir=data, model_config=model, output_dir=two, grad_accum_usteps=4, tensor_parallel_size=4,
        resume_ckpt=True, **COMMON, **given,
    )  # fmt: skip
    assert refused.returncode == 1
    assert "split over 2 tensor-parallel ranks, this run has 4; make it fit: python -m stages.convert" in refused.stdout
    four = tmp_path / "four"
    shutil.copytree(tmp_path / "joined" / "checkpoint", four / "checkpoints" / "ckpt_6")
    run(data, model, four, (4, 4), resume_ckpt=True, **given)
    ours = [record["loss"] for record in metrics(four)]
    np.testing.assert_allclose(ours, [record["loss"] for record in metrics(alone)][6:], rtol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "failpoint"),
    [
        ((2, 2), "step:5.1"),
        ((4, 2), "micro-step:7.0.0"),
        ((2, 2), "write-before:optimizer-01-of-02.safetensors"),
        ((4, 2), "write-after:rank-01.json"),
        ((2, 2), "rename-before:ckpt_6"),
    ],
)
def test_a_killed_run_ends_with_the_same_bytes(
    data: Path, model: Path, tmp_path: Path, whole: dict[tuple[int, int], Path], layout: tuple[int, int], failpoint: str
) -> None:
    """The run that is killed went on from step 3 itself, so that there is a checkpoint to resume from."""
    given = {"precision": "fp32", "max_steps": 9, "ckpt_interval_steps": 3, "resume_ckpt": True}
    later = shutil.ignore_patterns("ckpt_6", "ckpt_9", "results.json")
    out, token = shutil.copytree(whole[layout], tmp_path / "out", ignore=later), tmp_path / "token"
    token.touch()
    killed = train(
        layout[0], data_dir=data, model_config=model, output_dir=out, grad_accum_usteps=4 * 2 // layout[0],
        tensor_parallel_size=2, **COMMON | given, env={"FAILPOINT": failpoint, "FAILPOINT_TOKEN": str(token)},
    )  # fmt: skip
    assert killed.returncode == -9, killed.stdout
    run(data, model, out, layout, **given)
    assert_same_bytes(out / "checkpoints" / "ckpt_9", whole[layout] / "checkpoints" / "ckpt_9")


@pytest.mark.parametrize("damaged", ["model-01-of-02.safetensors", "optimizer-00-of-02.safetensors"])
def test_a_damaged_file_of_any_rank_makes_all_ranks_take_the_checkpoint_before(
    data: Path, model: Path, tmp_path: Path, whole: dict[tuple[int, int], Path], damaged: str
) -> None:
    given = {"precision": "fp32", "max_steps": 9, "ckpt_interval_steps": 3, "num_ckpts_to_keep": -1}
    out = run(data, model, tmp_path / "out", (2, 2), steps_this_run=6, **given)
    flip_a_byte(out / "checkpoints" / "ckpt_6" / damaged)
    resumed = train(
        2, data_dir=data, model_config=model, output_dir=out, grad_accum_usteps=4, tensor_parallel_size=2,
        resume_ckpt=True, **COMMON | given,
    )  # fmt: skip
    assert resumed.returncode == 0, resumed.stdout
    assert f"ckpt_6: {damaged} is damaged" in resumed.stdout
    assert f"resuming from checkpoint {out / 'checkpoints' / 'ckpt_3'} " in resumed.stdout
    assert [record["step"] for record in metrics(out)] == list(range(1, 10))
    assert_same_bytes(out / "checkpoints" / "ckpt_9", whole[2, 2] / "checkpoints" / "ckpt_9")


@pytest.fixture(scope="module")
def whole(data: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Path]:
    """Uninterrupted runs, with dropout."""
    given = {"precision": "fp32", "max_steps": 9, "ckpt_interval_steps": 3, "num_ckpts_to_keep": -1}
    return {layout: run(data, model, tmp_path_factory.mktemp("whole"), layout, **given) for layout in ((2, 2), (4, 2))}


def test_randomness_differs_inside_of_what_is_split_and_agrees_outside() -> None:
    device = CpuDevice()
    drawn = []
    for rank in range(2):
        ranks = TensorParallel(rank, 2, random_region=device.random_region)
        device.seed(7)
        ranks.seed(7)
        before = torch.rand(5)
        with ranks.region():
            inside = torch.rand(5)
        with ranks.region():
            again = torch.rand(5)
        drawn.append((before, inside, again, torch.rand(5)))
    (before, inside, again, after), other = drawn
    assert torch.equal(before, other[0])
    assert torch.equal(after, other[3])
    numbers = torch.stack([before, inside, again, after, other[1], other[2]])
    assert len(numbers.unique()) == numbers.numel()


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_rank_holds_little_more_than_its_share_of_bert_large(size: int) -> None:
    """Gradients and moments are each as large as the parameters."""
    with torch.device("meta"):
        alone, shared = (
            sum(p.numel() for p in BertForPreTraining(ModelConfig(), ranks=TensorParallel(0, n)).parameters())
            for n in (1, size)
        )
    assert shared <= 1.15 / size * alone


def test_two_ranks_write_little_more_than_half_each(data: Path, tmp_path: Path) -> None:
    """Measured: the bytes of parameters and moments that each rank of a real run holds."""
    model = write_model_config(tmp_path, vocab_size=2000, hidden_size=128, intermediate_size=512)
    held = {}
    for size in (1, 2):
        out = run(data, model, tmp_path / str(size), (size, size), max_steps=1, warmup_steps=0, precision="fp32")
        files = list((out / "checkpoints" / "ckpt_1").glob("*.safetensors"))
        held[size] = max(sum(f.stat().st_size for f in files if f"-{rank:02}-of" in f.name) for rank in range(size))
    assert held[2] <= 1.15 / 2 * held[1]


@pytest.mark.slow
@pytest.mark.usefixtures("torch_xla")
def test_xla_shares_a_model_as_the_cpu_does(data: Path, model: Path, tmp_path: Path) -> None:
    """The same layers over the device's collectives."""
    given = {"precision": "fp64", "disable_dropout": True, "max_steps": 6}
    alone = metrics(run(data, model, tmp_path / "cpu", (1, 1), **given))
    shared = metrics(run(data, model, tmp_path / "xla", (2, 2), **{**given, "device": "xla"}))
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose([r[name] for r in shared], [r[name] for r in alone], rtol=1e-8)
    assert shared[-1]["compiled_graphs"] == shared[2]["compiled_graphs"]


def test_what_cannot_be_split_is_one_line(data: Path, model: Path, tmp_path: Path) -> None:
    given = {"data_dir": data, "model_config": model, "output_dir": tmp_path / "out", "grad_accum_usteps": 1, **COMMON}
    done = train(1, **given, tensor_parallel_size=2)
    assert_one_line_error(done, "data_parallel_size = workers / tensor_parallel_size = 1 / 2 is not a whole number")
    odd = write_model_config(tmp_path, num_attention_heads=2)
    done = train(4, **{**given, "model_config": odd}, tensor_parallel_size=4)
    assert "tensor_parallel_size = 4 does not divide num_attention_heads = 2: 2 / 4 = 0.5" in done.stdout
    assert "Traceback" not in done.stdout
    done = train(2, **given, tensor_parallel_size=2, data_parallel="ddp")
    assert "--data_parallel ddp does not go with --tensor_parallel_size 2; use allreduce" in done.stdout
