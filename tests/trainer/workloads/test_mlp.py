"""The tutorial's MLP: the model and its data, and the loop, checkpoints and workers that it shares with BERT."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from common.process import free_port
from tests.helpers.images import write_idx, write_images
from tests.helpers.support import (
    ROOT,
    assert_one_line_error,
    assert_resumed,
    command,
    losses,
    metrics,
    options,
    tensors,
    train,
)
from trainer.data.batch_ramp import BatchSizes
from trainer.data.loader import Loader
from trainer.data.order import SampleOrder
from trainer.models.mlp import MLP
from trainer.workloads.mnist import TRAINING, Images

IMAGES = 300
COMMON = {"workload": "mnist", "device": "cpu", "batch_size": 8, "log_interval": 10}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("images"), training=IMAGES)


def run(data: Path, out: Path, *, workers: int = 1, **values: object) -> Path:
    done = train(workers, data_dir=data, output_dir=out, **{**COMMON, **values})
    assert done.returncode == 0, done.stdout
    assert_resumed(done, values)
    return out


def reference(
    data: Path, workers: int, epochs: int, max_norm: float = float("inf")
) -> tuple[list[float], nn.Module]:  # fmt: skip
    """The tutorial's loop in float64 on batches in our order: log-softmax, NLL, SGD; returns the losses and the model.

    Several workers act as one that has all their images: the mean over the global batch is the mean of their means.
    """
    images = gzip.decompress((data / TRAINING[0]).read_bytes())[16:]
    labels = gzip.decompress((data / TRAINING[1]).read_bytes())[8:]
    x = torch.frombuffer(bytearray(images), dtype=torch.uint8).view(-1, 784).to(torch.float32).div(255).double()
    y = torch.frombuffer(bytearray(labels), dtype=torch.uint8).long()
    start = MLP()
    start.initialise(12349)
    model = nn.Sequential(
        nn.Linear(784, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10), nn.LogSoftmax(dim=1)
    ).double()
    for theirs, ours in zip(model.parameters(), start.parameters(), strict=True):
        theirs.data.copy_(ours.data)
    optimizer, loss_of = torch.optim.SGD(model.parameters(), lr=0.05 * workers), nn.NLLLoss()
    order = SampleOrder(np.array([IMAGES]), seed=12349, sizes=[BatchSizes(8 * workers)])
    curve = []
    for step in range(epochs * (IMAGES // (8 * workers))):
        rows = torch.from_numpy(order.step(step).row)
        optimizer.zero_grad()
        loss = loss_of(model(x[rows]), y[rows])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        curve.append(loss.item())
    return curve, model


@pytest.mark.parametrize("workers", [1, 2])
def test_training_is_the_tutorials(data: Path, tmp_path: Path, workers: int) -> None:
    """Same images, model, optimizer, learning rate (times the workers) and epochs, whose tails are left out."""
    out = run(data, tmp_path, workers=workers, epochs=2, precision="fp64")
    curve, model = reference(data, workers, epochs=2)
    np.testing.assert_allclose(losses(out), curve, rtol=1e-8)
    assert curve[-1] < curve[0] - 0.2
    records = metrics(out)
    assert {record["learning_rate"] for record in records} == {0.05 * workers}
    assert all(record["loss"] == record["nll_loss"] for record in records)
    saved = tensors(out / "checkpoints" / f"ckpt_{len(curve)}")
    names = [f"fc{layer}.{kind}" for layer in (1, 2, 3) for kind in ("weight", "bias")]
    assert sorted(saved) == sorted(names)
    for name, parameter in zip(names, model.parameters(), strict=True):
        np.testing.assert_allclose(saved[name], parameter.detach(), rtol=1e-8, atol=1e-10)


def test_gradients_are_clipped_as_torch_clips_them(data: Path, tmp_path: Path) -> None:
    """Some of them: the norm grows past the limit as the model learns."""
    out = run(data, tmp_path, epochs=1, precision="fp64", max_grad_norm=0.6)
    curve, _ = reference(data, 1, epochs=1, max_norm=0.6)
    np.testing.assert_allclose(losses(out), curve, rtol=1e-8)
    norms = [record["grad_norm"] for record in metrics(out)]
    assert min(norms) < 0.6 < max(norms)


def test_it_prints_what_the_tutorial_prints(data: Path, tmp_path: Path) -> None:
    done = train(data_dir=data, output_dir=tmp_path, epochs=1, **COMMON)
    lines = done.stdout.splitlines()
    (rate,) = (line.split(": ")[1] for line in lines if line.startswith("Train throughput (iter/sec): "))
    times = [record["step_time_s"] for record in metrics(tmp_path)][2:]
    assert float(rate) == pytest.approx(len(times) / sum(times))
    assert f"Final loss is {losses(tmp_path)[-1]:.4f}" in lines


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_run_ends_with_the_same_bytes(data: Path, tmp_path: Path, workers: int) -> None:
    values = {"workers": workers, "epochs": 2, "ckpt_interval_steps": 10}
    straight = run(data, tmp_path / "straight", **values)
    out = tmp_path / "killed"
    killed = train(workers, data_dir=data, output_dir=out, env={"FAILPOINT": "step:27.0"}, epochs=2,
                   ckpt_interval_steps=10, **COMMON)  # fmt: skip
    assert killed.returncode == -9, killed.stdout
    run(data, out, resume_ckpt=True, **values)
    steps = len(metrics(straight))
    wanted, got = (tensors(directory / "checkpoints" / f"ckpt_{steps}") for directory in (straight, out))
    assert {name: tensor.tobytes() for name, tensor in got.items()} == {
        name: tensor.tobytes() for name, tensor in wanted.items()
    }
    assert [record["step"] for record in metrics(out)] == list(range(1, steps + 1))
    assert losses(out) == losses(straight)


@pytest.mark.usefixtures("torch_xla")
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_xla_computes_the_cpus_curve(data: Path, tmp_path: Path, workers: int) -> None:
    curves = [
        losses(run(data, tmp_path / device, workers=workers, epochs=1, device=device, precision="fp64"))
        for device in ("cpu", "xla")
    ]
    np.testing.assert_allclose(curves[1], curves[0], rtol=1e-8)
    if workers == 1:
        counts = [record["compiled_graphs"] for record in metrics(tmp_path / "xla")[3:]]
        assert set(counts) == {2}, counts


def test_with_disable_xla_it_runs_without_xla(data: Path, tmp_path: Path) -> None:
    """As in the developer guide: any value will do."""
    values = {**COMMON, "device": "xla", "epochs": 1}
    done = train(data_dir=data, output_dir=tmp_path / "out", env={"DISABLE_XLA": "1"}, **values)
    assert done.returncode == 0, done.stdout
    said = [line for line in done.stdout.splitlines() if "DISABLE_XLA" in line]
    assert said == ["DISABLE_XLA=1: device auto instead of xla, without XLA"]
    assert losses(tmp_path / "out") == losses(run(data, tmp_path / "cpu", epochs=1, device="auto"))


@pytest.mark.slow
def test_two_nodes_of_one_worker_are_two_workers(data: Path, tmp_path: Path) -> None:
    """Two launchers on loopback, as on two machines with a shared file system.

    Each is limited to one core: a launcher gives its workers all the threads of its machine, and sums in two threads
    are rounded differently from those of the tests' workers, which have one thread.
    """
    core = min(os.sched_getaffinity(0))
    port = free_port()
    launchers = []
    for rank in (0, 1):
        words = ["--nnodes=2", f"--node_rank={rank}", "--nproc_per_node=1", "--max-restarts=0",
                 "--master_addr=127.0.0.1", f"--master_port={port}", "-m", "trainer"]  # fmt: skip
        words += options(data_dir=data, output_dir=tmp_path / "nodes", epochs=1, **COMMON)
        launchers.append(
            subprocess.Popen(
                [sys.executable, "-m", "trainer.launch.torchrun", *words],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ},
                preexec_fn=lambda: os.sched_setaffinity(0, {core}),
            )  # fmt: skip
        )
    try:
        said = [launcher.communicate(timeout=120)[0] for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
    assert [launcher.returncode for launcher in launchers] == [0, 0], said
    assert "2 worker(s)" in said[0]
    workers = run(data, tmp_path / "workers", workers=2, epochs=1)
    assert losses(tmp_path / "nodes") == losses(workers)
    wanted, got = (tensors(tmp_path / name / "checkpoints" / "ckpt_18") for name in ("workers", "nodes"))
    assert {name: t.tobytes() for name, t in got.items()} == {name: t.tobytes() for name, t in wanted.items()}


def test_small_steps_are_read_together_and_stay_the_same(data: Path) -> None:
    """The loader reads many steps at once, also across an epoch's end (37 steps), for each of two workers."""
    order = SampleOrder(np.array([IMAGES]), seed=3, sizes=[BatchSizes(8)])
    images = Images(data, TRAINING)
    for rank in (0, 1):
        loader = Loader(images, order, micro_batch_size=2, rank=rank, size=2)
        steps = list(loader.steps(30, 45))
        assert [step.index for step in steps] == list(range(30, 45))
        assert [step.epoch for step in steps] == [0] * 7 + [1] * 8
        for step in steps:
            rows = order.step(step.index).row.reshape(2, 2, 2)[:, rank]
            np.testing.assert_array_equal(step.samples.row, rows.reshape(-1))
            assert step.counts == (4,)
            for batch, wanted in zip(step.micro_batches, rows, strict=True):
                np.testing.assert_array_equal(batch.labels, images.labels[wanted])
                expected = (images.pixels[wanted] / np.float32(255)).astype(np.float32)
                np.testing.assert_array_equal(batch.images, expected)


def test_options_of_bert_are_unknown_and_help_shows_its_own() -> None:
    done = command("-m", "trainer", "--workload", "mnist", "--seq_len", "128")
    assert done.returncode == 2
    assert "unknown option --seq_len" in done.stderr
    shown = command("-m", "trainer", "--workload", "mnist", "--help").stdout
    assert "--epochs" in shown
    assert "--seq_len" not in shown
    assert "DistributedDataParallel" in shown


def test_bad_input_is_one_line(data: Path, tmp_path: Path) -> None:
    def refused(directory: Path, *fragments: str, **values: object) -> None:
        done = train(data_dir=directory, output_dir=tmp_path / "out", **{**COMMON, **values})
        assert_one_line_error(done, *fragments)

    refused(data, "300 samples", "global batch of 512", batch_size=512)
    refused(data, "--epochs is 0", "1 or more", epochs=0)
    refused(tmp_path / "nothing", "train-images-idx3-ubyte.gz", "give the directory that has")
    refused(data, "--batch_size is 0", "1 or more", batch_size=0)


@pytest.mark.parametrize(
    ("damage", "fragments"),
    [
        (lambda raw: raw[:-100], ("images", "fetch it again")),
        (lambda raw: b"not gzip", ("cannot read", "gzip")),
        (lambda raw: gzip.compress(gzip.decompress(raw)[:-1]), ("holds 7839 values", "says 7840")),
        (lambda raw: gzip.compress(gzip.decompress(raw) + b"x"), ("holds more values", "says 7840")),
        (lambda raw: gzip.compress(b"\0\0\x0d\x03" + gzip.decompress(raw)[4:]), ("begins with 00000d03", "00000803")),
        (lambda raw: gzip.compress(b""), ("begins with nothing",)),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, damage, fragments: tuple[str, ...]) -> None:  # type: ignore[no-untyped-def]
    path = write_images(tmp_path, training=10) / TRAINING[0]
    path.write_bytes(damage(path.read_bytes()))
    done = train(data_dir=tmp_path, output_dir=tmp_path / "out", **COMMON)
    assert_one_line_error(done, str(path), *fragments)


def test_images_of_another_form_are_refused(tmp_path: Path) -> None:
    write_images(tmp_path, training=10)
    write_idx(tmp_path / TRAINING[1], np.full(10, 10))
    assert_one_line_error(train(data_dir=tmp_path, output_dir=tmp_path / "out", **COMMON), "label 10", "0 to 9")
    write_idx(tmp_path / TRAINING[1], np.zeros(9))
    assert_one_line_error(train(data_dir=tmp_path, output_dir=tmp_path / "out", **COMMON), "10 images", "9 labels")
    write_idx(tmp_path / TRAINING[0], np.zeros((10, 32, 32)))
    assert_one_line_error(train(data_dir=tmp_path, output_dir=tmp_path / "out", **COMMON), "32 × 32", "28 × 28")


def test_a_checkpoint_of_bert_is_refused(data: Path, tmp_path: Path) -> None:
    """And the other way round: the model is part of the state."""
    out = run(data, tmp_path / "out", epochs=1)
    state = out / "checkpoints" / "ckpt_37" / "state.json"
    assert '"architecture": "MLP"' in state.read_text()
    done = train(data_dir=data, output_dir=out, epochs=2, resume_ckpt=True, **{**COMMON, "batch_size": 4})
    assert_one_line_error(done, "global_batch_size = 8, this run has 4")
