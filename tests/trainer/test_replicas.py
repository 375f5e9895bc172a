"""Workers that hold the same weights are compared: one flipped bit is found, named, and never saved."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from common.errors import AgreedError, NonFiniteStep, ReplicasDiffer
from tests.helpers.support import assert_resumed, assert_same_bytes, metrics, train
from trainer.devices.cpu import CpuDevice
from trainer.parallel.mesh import Mesh
from trainer.replicas import ReplicaCheck, flip_a_bit

GIVEN: dict[str, Any] = {
    "batch_size": 2, "grad_accum_usteps": 2, "warmup_steps": 1, "max_pred_len": 5, "device": "cpu", "max_steps": 8,
    "ckpt_interval_steps": 3, "num_ckpts_to_keep": -1, "precision": "fp32",
}  # fmt: skip


def flipped(step: int, rank: int) -> dict[str, str]:
    """One bit of one weight of that worker flips after that step."""
    return {"FAILPOINT": f"step:{step}.{rank}", "FAILPOINT_ACTION": "damage"}


@pytest.mark.parametrize(
    ("workers", "rank", "who"),
    [
        (2, 0, "workers 0, 1 differ;"),
        (2, 1, "workers 0, 1 differ;"),
        (3, 0, "worker 0 differ from those of the others"),
        (3, 2, "worker 2 differ from those of the others"),
    ],
)
def test_a_flipped_bit_is_found_before_it_is_saved(
    data: Path, model: Path, tmp_path: Path, workers: int, rank: int, who: str
) -> None:
    given = {**GIVEN, "data_dir": data, "model_config": model, "output_dir": tmp_path / "out"}
    done = train(workers, env=flipped(5, rank), replica_check_steps=0, **given)
    assert done.returncode == 71, done.stdout
    (error,) = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    assert error.startswith("error: step 6: the weights or moments of")
    assert who in error
    assert "Traceback" not in done.stdout
    assert sorted(path.name for path in (tmp_path / "out" / "checkpoints").iterdir()) == ["ckpt_3"]
    done = train(workers, resume_ckpt=True, **given)
    assert done.returncode == 0, done.stdout
    assert_resumed(done, {"resume_ckpt": True})
    straight = train(workers, **{**given, "output_dir": tmp_path / "straight"})
    assert straight.returncode == 0, straight.stdout
    assert_same_bytes(tmp_path / "out" / "checkpoints" / "ckpt_8", tmp_path / "straight" / "checkpoints" / "ckpt_8")


def test_between_checkpoints_they_are_compared_every_so_many_steps(data: Path, model: Path, tmp_path: Path) -> None:
    given = {**GIVEN, "data_dir": data, "model_config": model, "output_dir": tmp_path, "ckpt_interval_steps": 0}
    done = train(2, env=flipped(3, 1), replica_check_steps=2, **given)
    assert done.returncode == 71, done.stdout
    assert "error: step 4: " in done.stdout
    assert not list((tmp_path / "checkpoints").iterdir())


def test_ranks_that_share_a_model_are_compared_with_those_of_the_same_share(
    data: Path, model: Path, tmp_path: Path
) -> None:
    """2 × 2 workers: 1 and 3 hold the same share."""
    given = {**GIVEN, "data_dir": data, "model_config": model, "output_dir": tmp_path, "tensor_parallel_size": 2}
    done = train(4, env=flipped(2, 3), **given)
    assert done.returncode == 71, done.stdout
    assert "workers 1, 3 differ;" in done.stdout
    done = train(4, resume_ckpt=True, **given)
    assert done.returncode == 0, done.stdout
    assert [record["step"] for record in metrics(tmp_path)] == list(range(1, 9))


class Incomplete(Exception):
    """Not every worker has said what it holds."""


@dataclass(frozen=True)
class Meeting(Mesh):
    """The mesh of one worker in a process that plays all of them, one after the other."""

    said: dict[int, Any] = field(default_factory=dict)

    def all_gather_object(self, value: Any) -> list[Any]:
        self.said[self.rank] = value
        if len(self.said) < self.world_size:
            raise Incomplete
        return [self.said[rank] for rank in range(self.world_size)]


SPLIT, UNSPLIT = "bert.encoder.layer.0.attention.self.query.weight", "bert.pooler.dense.bias"


@pytest.mark.parametrize(
    ("workers", "size", "rank", "name", "who"),
    [
        (2, 2, 1, UNSPLIT, "workers 0, 1 differ;"),
        (2, 2, 1, f"exp_avg.{UNSPLIT}", "workers 0, 1 differ;"),
        (4, 4, 2, UNSPLIT, "worker 2 differ from those of the others;"),
        (4, 2, 3, UNSPLIT, "worker 3 differ from those of the others;"),
        (4, 2, 3, SPLIT, "workers 1, 3 differ;"),
        (4, 1, 2, SPLIT, "worker 2 differ from those of the others;"),
        (2, 2, 1, SPLIT, ""),
        (4, 2, (1, 3), UNSPLIT, "workers 0, 1, 2, 3 differ;"),  # the same in both copies of the model
    ],
)
def test_who_differs_in_what_is_split_and_what_is_not(
    workers: int, size: int, rank: int | tuple[int, int], name: str, who: str
) -> None:
    """Ranks of one model always differ in what they split."""
    config = SimpleNamespace(trial=False)
    state: Any = SimpleNamespace(global_step=7, step=7, precision="fp32")
    said: dict[int, Any] = {}
    checks = []
    for each in range(workers):
        model = {SPLIT: torch.full((3,), float(each % size)), UNSPLIT: torch.zeros(2)}
        optimizer = {f"exp_avg.{UNSPLIT}": torch.ones(2)}
        if each in np.atleast_1d(rank):
            flip_a_bit({**model, **optimizer}[name])
        mesh = Meeting(each, each, workers, workers, size, said=said)
        run: Any = SimpleNamespace(config=config, device=CpuDevice(), mesh=mesh)
        checks.append(ReplicaCheck(run, model, optimizer, are_shared=False))
    for check in checks[:-1]:
        with pytest.raises(Incomplete):
            check.require_equal(state)
    for check in reversed(checks):
        if not who:
            check.require_equal(state)
            continue
        with pytest.raises(ReplicasDiffer, match=f"step 7: the weights or moments of {who}"):
            check.require_equal(state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("offset", [0, 1])
def test_the_sum_of_a_tensors_bits_knows_every_bit(dtype: torch.dtype, offset: int) -> None:
    """Also for a view that begins and ends between two words; compared with numpy's sum of the same bytes."""
    tensor = torch.randn(64, generator=torch.Generator().manual_seed(0)).to(dtype)[offset:33]
    device = CpuDevice()
    ((whole, is_finite),) = device.summaries([tensor])
    assert is_finite
    raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    words = np.frombuffer(raw + bytes(-len(raw) % 8), np.int64)
    with np.errstate(over="ignore"):
        assert whole == int(words.sum())
    for bit in range(8 * len(raw)):
        changed = tensor.clone()
        changed.view(torch.uint8).numpy()[bit // 8] ^= np.uint8(1 << bit % 8)
        assert device.summaries([changed])[0][0] != whole


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_found(value: float) -> None:
    tensors = [torch.ones(7), torch.empty(0), torch.ones(3, 5)]
    tensors[2][1, 4] = value
    assert [is_finite for _, is_finite in CpuDevice().summaries(tensors)] == [True, True, False]


def test_weights_that_are_not_finite_from_the_start_are_no_step() -> None:
    """No batch is to blame, so none is left out: it ends at once."""
    mesh = Meeting(0, 0, 1, 1)
    run: Any = SimpleNamespace(config=SimpleNamespace(trial=False), device=CpuDevice(), mesh=mesh)
    check = ReplicaCheck(run, {SPLIT: torch.tensor([1.0, float("nan")])}, {}, are_shared=False)
    begun: Any = SimpleNamespace(global_step=40, step=0, precision="fp32")
    with pytest.raises(AgreedError, match=f"step 40: {SPLIT} of worker 0 is not finite; begin with other weights"):
        check.require_equal(begun)
    with pytest.raises(NonFiniteStep) as error:
        check.require_equal(SimpleNamespace(global_step=41, step=1, precision="fp32"))  # type: ignore[arg-type]
    assert error.value.step == 0
