"""The CPU's operations compared with torch's, and the threads they run in."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from common.process import THREADS_VARIABLE, available_cores
from tests.helpers.support import ROOT, options, write_dataset, write_model_config
from trainer.data.bert_batch import IGNORED
from trainer.devices.cpu import CpuDevice
from trainer.devices.cpu_kernels import library
from trainer.devices.cpu_operations import CpuOperations
from trainer.models.operations import Operations

V = 1000
#: `python -c … FILE`, then the trainer's options: trains with two threads and writes to FILE how many threads besides
#: Python's there were: before training, when torch had its own, and at the end of each step.
COUNTS_THREADS = """
import sys, threading
from pathlib import Path
import torch
from trainer.__main__ import main
from trainer.loop import Trainer

def count():
    ours = {thread.native_id for thread in threading.enumerate()}
    counts.append(sum(int(task.name) not in ours for task in Path("/proc/self/task").iterdir()))

def train_step(*args):
    done = original(*args)
    count()
    return done

counts, file, original = [], Path(sys.argv.pop(1)), Trainer.train_step
torch.set_num_threads(2)
torch.ones(10**6).mul_(2)
count()
Trainer.train_step = train_step
status = main()
file.write_text(" ".join(map(str, counts)))
sys.exit(status)
"""


def logits_and_labels(size: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (size * torch.randn(20, V, generator=generator, dtype=torch.float64)).to(dtype)
    labels = torch.randint(V, (20,), generator=generator)
    logits[5, labels[5]] = logits[5].logsumexp(0) + 3  # a model that is sure, and right
    labels[[2, 18, 19]] = IGNORED
    return logits.requires_grad_(), labels


def of(ops: Operations, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The loss, and its gradient times a number that bf16 cannot represent."""
    loss = ops.cross_entropy(logits, labels)
    (gradient,) = torch.autograd.grad(loss / 702.2, logits)
    return loss.detach(), gradient


# At 3,000 most probabilities underflow, even in fp64: losses are thousands of nats.
@pytest.mark.parametrize("size", [1.0, 30.0, 3000.0])
def test_cross_entropy_is_torchs(size: float) -> None:
    logits, labels = logits_and_labels(size, torch.float64)
    loss, gradient = of(CpuOperations(), logits, labels)
    expected = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected / 702.2, logits)[0], rtol=1e-10, atol=1e-16)
    assert not gradient[[2, 18, 19]].any()
    with torch.no_grad():
        assert torch.equal(CpuOperations().cross_entropy(logits, labels), loss)


@pytest.mark.parametrize(("dtype", "digit"), [(torch.float32, 2.0**-24), (torch.bfloat16, 2.0**-8)])
def test_cross_entropy_rounds_its_gradient_twice_at_most(dtype: torch.dtype, digit: float) -> None:
    """Compared with fp64, from the same logits; sums and softmax are in fp32, within 1e-5. `digit`: one rounding."""
    logits, labels = logits_and_labels(3.0, dtype)
    loss, gradient = of(CpuOperations(), logits, labels)
    exact, wanted = of(Operations(), logits.detach().double().requires_grad_(), labels)
    assert loss.dtype == torch.float32
    assert gradient.dtype == dtype
    torch.testing.assert_close(loss.double(), exact, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient.double(), wanted, rtol=2 * digit + 1e-5, atol=1e-12)
    # Nor is a digit of the factor lost, which would be the same error in all (except those nearly -1 times it).
    smaller = wanted > 0
    assert abs((gradient.double() / wanted)[smaller].mean() - 1) < digit / 20 + 1e-6


def test_the_cross_entropy_of_nothing_is_nothing() -> None:
    loss, gradient = of(
        CpuOperations(), torch.zeros(0, V, dtype=torch.bfloat16).requires_grad_(), torch.zeros(0).long()
    )
    assert loss == 0
    assert gradient.shape == (0, V)


@pytest.mark.skipif(library() is None, reason="needs a C compiler: torch multiplies, so that infinity becomes NaN")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_dropout_keeps_bits_as_they_are(dtype: torch.dtype) -> None:
    """What is kept is x times the scale, rounded once; what is dropped is 0, whatever it was. Strided tensors, too."""
    torch.manual_seed(0)
    x = torch.randn(40, 50, 60).to(dtype).transpose(0, 2)
    x[0, 0] = torch.inf
    y = CpuOperations().dropout(x, 0.25)
    is_kept = y != 0
    assert 0.7 < is_kept.double().mean() < 0.8
    assert torch.equal(y[is_kept], (x * (1 / 0.75))[is_kept])
    assert 0 < int(is_kept[0, 0].sum()) < 40


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_other_thread_of_training_has_threads_of_its_own(data: Path, tmp_path: Path) -> None:
    """With more threads than cores, those that train sleep at every wait: a step took 1.5 times as long."""
    given = {
        "data_dir": data, "model_config": write_model_config(tmp_path, hidden_size=256, intermediate_size=1024),
        "output_dir": tmp_path / "out", "batch_size": 8, "max_steps": 12, "warmup_steps": 1, "grad_accum_usteps": 2,
        "max_pred_len": 5, "device": "cpu", "ckpt_interval_steps": 3,
    }  # fmt: skip
    words = [sys.executable, "-c", COUNTS_THREADS, str(tmp_path / "threads"), *options(**given)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    before, *counts = (int(word) for word in (tmp_path / "threads").read_text().split())
    assert before > 0
    assert counts == [before] * 12


@pytest.mark.parametrize(("given", "expected"), [pytest.param("1", 1, marks=pytest.mark.slow), (None, 2)])
def test_the_users_number_of_threads_counts_under_torchrun(tmp_path: Path, given: str | None, expected: int) -> None:
    """The worker has both cores."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    data = write_dataset(tmp_path / "data", [21])
    words = options(data_dir=data, model_config=write_model_config(tmp_path), output_dir=tmp_path / "out", batch_size=2,
                    grad_accum_usteps=1, max_pred_len=5, device="cpu", max_steps=1, warmup_steps=0)  # fmt: skip
    env = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    env |= {} if given is None else {"OMP_NUM_THREADS": given}
    both = sorted(os.sched_getaffinity(0))[:2]
    launcher = [sys.executable, "-m", "trainer.launch.torchrun", "--standalone", "--local-addr=127.0.0.1"]
    done = subprocess.run(
        [*launcher, "--nproc_per_node=1", "-m", "trainer", *words], env=env, cwd=ROOT, text=True, capture_output=True,
        preexec_fn=lambda: os.sched_setaffinity(0, both), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"cpu, {expected} thread" in done.stdout + done.stderr


@pytest.mark.parametrize("is_given", [False, True])
def test_torchruns_number_of_threads_does_not_count(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, is_given: bool
) -> None:
    """torchrun sets it to 1 for several workers where it is not set; only ours says whether it was."""
    request.addfinalizer(functools.partial(torch.set_num_threads, torch.get_num_threads()))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    if is_given:
        monkeypatch.setenv(THREADS_VARIABLE, "1")
    CpuDevice(local_world_size=1)
    assert torch.get_num_threads() == (1 if is_given else available_cores())
