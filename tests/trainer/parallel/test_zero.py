"""`--shard_optimizer`: workers share moments and master weights, and train the same as without it."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

from tests.helpers.chain import wait_until
from tests.helpers.support import (
    Workers,
    assert_one_line_error,
    assert_resumed,
    assert_same_bytes,
    losses,
    options,
    train,
)
from trainer.optim.sharing import Replicas
from trainer.optim.zero import ShardedParameters
from trainer.precision import Precision
from trainer.seeds import derive_seed

GIVEN: dict[str, Any] = {
    "batch_size": 4, "lr": 3e-3, "warmup_steps": 2, "max_pred_len": 5, "max_steps": 8, "ckpt_interval_steps": 4,
    "device": "cpu", "precision": "fp64", "optimizer": "AdamW",
}  # fmt: skip


def run(data: Path, model: Path, out: Path, workers: int, *, size: int = 1, **values: object) -> Path:
    """16 sequences a step whatever the layout; every worker keeps a share of the state unless told otherwise."""
    given = {"shard_optimizer": True, "grad_accum_usteps": 4 * size // workers, **GIVEN, **values}
    done = train(workers, data_dir=data, model_config=model, output_dir=out, tensor_parallel_size=size, **given)
    assert done.returncode == 0, done.stdout
    assert_resumed(done, values)
    return out


def assert_close(out: Path, other: Path) -> None:
    """The same state except for the order of the sums in a norm, whose effect grows over 8 steps of float64."""
    files = sorted(path.name for path in (other / "checkpoints" / "ckpt_8").glob("*.safetensors"))
    assert files
    for file in files:
        found, wanted = (load_file(directory / "checkpoints" / "ckpt_8" / file) for directory in (out, other))
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            np.testing.assert_allclose(found[name], tensor, rtol=1e-9, atol=1e-13, err_msg=name)
    np.testing.assert_allclose(losses(out), losses(other), rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["AdamW", "LAMB", "Muon"])
@pytest.mark.parametrize(("workers", "size"), [(2, 1), (4, 1), (4, 2)])
def test_weights_and_moments_are_those_of_unshared_ones(
    data: Path, model: Path, tmp_path: Path, workers: int, size: int, optimizer: str
) -> None:
    outs = [
        run(data, model, tmp_path / str(on), workers, size=size, optimizer=optimizer, shard_optimizer=on)
        for on in (True, False)
    ]
    assert_close(*outs)


@pytest.mark.slow
def test_master_weights_are_shared_too(data: Path, model: Path, tmp_path: Path) -> None:
    shared, whole = (
        losses(run(data, model, tmp_path / str(on), 2, precision="bf16-master", shard_optimizer=on))
        for on in (True, False)
    )
    # 2⁻⁹ is bf16's rounding; a different last bit of an fp32 norm moves a few weights across it.
    np.testing.assert_allclose(shared, whole, rtol=2**-9)
    assert shared != losses(run(data, model, tmp_path / "fp32", 2, precision="fp32"))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp64", "bf16-sr"])
def test_an_interrupted_run_ends_with_the_same_bytes(data: Path, model: Path, tmp_path: Path, precision: str) -> None:
    straight = run(data, model, tmp_path / "straight", 2, precision=precision)
    cut = run(data, model, tmp_path / "cut", 2, precision=precision, steps_this_run=3)
    run(data, model, cut, 2, precision=precision, resume_ckpt=True)
    assert_same_bytes(*(out / "checkpoints" / "ckpt_8" for out in (straight, cut)))


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_any_number_of_shares(data: Path, model: Path, tmp_path: Path) -> None:
    straight = run(data, model, tmp_path / "straight", 1, shard_optimizer=False)
    out = tmp_path / "out"
    for at, (workers, shared) in enumerate(((4, True), (2, True), (1, False), (2, False)), start=1):
        run(data, model, out, workers, shard_optimizer=shared, steps_this_run=2 * at, resume_ckpt=at > 1)
    assert_close(out, straight)


class Layers(nn.Module):
    """Parameters of very different sizes, as BERT has them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(97, 31)
        self.layers = nn.ModuleList(nn.Linear(31, 31) for _ in range(9))


def shares(size: int, precision: Precision) -> list[ShardedParameters]:
    """The shares of all workers, each with its own model."""
    found = []
    for rank in range(size):
        torch.manual_seed(0)
        found.append(
            ShardedParameters(
                Layers().float(), lambda name: name.endswith("weight"), 2, precision, replicas=Replicas(rank, size)
            )
        )
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 8, 40])
def test_each_parameter_is_one_workers_and_the_shares_are_even(size: int) -> None:
    """Graham 1969: with the largest assigned first, no share exceeds an even one by more than the largest piece."""
    model = dict(Layers().named_parameters())
    kept = []
    for worker in shares(size, Precision("bf16-master")):
        masters = worker.masters()
        for name, tensor in masters.items():
            torch.manual_seed(0)
            torch.testing.assert_close(tensor, dict(Layers().named_parameters())[name].detach(), rtol=0, atol=0)
        assert sum(group.zeros()[0].numel() for group in worker.groups) == sum(t.numel() for t in masters.values())
        kept.append(masters)
    assert sorted(name for masters in kept for name in masters) == sorted(model)
    total, largest = (of(p.numel() for p in model.values()) for of in (sum, max))
    assert max(sum(t.numel() for t in masters.values()) for masters in kept) <= total / size + largest


@pytest.mark.slow
def test_workers_round_independently(data: Path, model: Path, tmp_path: Path) -> None:
    """Rounding two shares stochastically with the same numbers would correlate their errors. Halfway between two bf16
    numbers each goes up with probability 1/2, so two independent workers agree on half of them."""
    ups = []
    for worker in shares(2, Precision("bf16-sr", _rounded)):
        torch.manual_seed(derive_seed(1, "stochastic rounding", 0, *worker.rounding_seed))
        (group, *_) = worker.groups
        with group.opened() as weights:
            weights[0].fill_(1 + 2**-8)
        ups.append(group.weights[0][:4000] > 1)
    n = min(map(len, ups))
    agree = float((ups[0][:n] == ups[1][:n]).float().mean())
    assert abs(agree - 0.5) < 5 * 0.5 / n**0.5
    # Training uses this seed: one worker's rounding differs from that of an unshared state, and nothing else does.
    given = {"max_steps": 1, "ckpt_interval_steps": 0, "warmup_steps": 0, "precision": "bf16-sr"}
    outs = [run(data, model, tmp_path / str(on), 1, shard_optimizer=on, **given) for on in (True, False)]
    assert losses(outs[0]) == losses(outs[1])
    ours, unshared = (out / "checkpoints" / "ckpt_1" / "model-00-of-01.safetensors" for out in outs)
    assert ours.read_bytes() != unshared.read_bytes()


def _rounded(x: torch.Tensor) -> torch.Tensor:
    from trainer.optim.rounding import stochastically_rounded

    return stochastically_rounded(x, torch.Tensor.view)


@pytest.mark.slow
def test_a_lost_workers_share_is_gone_and_the_run_goes_on_from_its_checkpoint(
    data: Path, model: Path, tmp_path: Path
) -> None:
    given = {**GIVEN, "data_dir": data, "model_config": model, "grad_accum_usteps": 2, "shard_optimizer": True}
    out = tmp_path / "out"
    stop = {"FAILPOINT": "micro-step:6.1.1", "FAILPOINT_ACTION": "stop"}
    workers = Workers(2, "trainer", options(output_dir=out, **given), stop)
    lost = workers.processes[1]
    wait_until(lambda: psutil.Process(lost.pid).status() == psutil.STATUS_STOPPED, timeout_s=60)
    wait_until((out / "checkpoints" / "ckpt_4").exists, timeout_s=60)  # it is written meanwhile
    lost.signal_group(signal.SIGKILL)
    done = workers.wait()
    assert done.returncode, done.stdout
    assert "Traceback" not in done.stderr, done.stderr
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["ckpt_4"]
    run(data, model, out, 2, resume_ckpt=True)
    straight = run(data, model, tmp_path / "straight", 2)
    assert_same_bytes(*(directory / "checkpoints" / "ckpt_8" for directory in (out, straight)))


def test_a_flipped_bit_is_found(data: Path, model: Path, tmp_path: Path) -> None:
    """In the step before a checkpoint; the next update would replace the weight with its owner's."""
    env = {"FAILPOINT": "step:4.1", "FAILPOINT_ACTION": "damage"}
    given = {**GIVEN, "data_dir": data, "model_config": model, "grad_accum_usteps": 2, "shard_optimizer": True}
    done = train(2, env=env, output_dir=tmp_path / "out", **given)
    assert_one_line_error(
        done, "the weights or moments of workers 0, 1 differ", "nothing of this step is saved", status=71
    )


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"data_parallel": "ddp"}, "ddp does not go with"),
        ({"device": "xla", "precision": "fp32"}, "compiles the update: it would be a different graph on every worker"),
    ],
)
def test_what_cannot_share_says_so(data: Path, model: Path, tmp_path: Path, option: dict[str, str], said: str) -> None:
    if option.get("device") == "xla":
        pytest.importorskip("torch_xla")
    given = {**GIVEN, "data_dir": data, "model_config": model, "output_dir": tmp_path, "grad_accum_usteps": 4}
    assert_one_line_error(train(shard_optimizer=True, **{**given, **option}), said, "--shard_optimizer")
