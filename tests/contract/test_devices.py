"""What every device promises to the training loop. Every device in the registry passes the same tests wherever it can
be started; those that compile whole steps are tested through real training (tests/trainer/devices)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from common.errors import UserError
from trainer import registry
from trainer.data.batch import Batch
from trainer.devices.base import Device
from trainer.devices.neuron_native import NeuronCompiler
from trainer.devices.select import select_alone
from trainer.registry import PRECISIONS

NAMES = [name for name, reference in registry.DEVICES.items() if not registry.load(reference).compiles_steps]


def test_what_is_said_of_a_device_without_importing_it_is_true() -> None:
    for name, reference in registry.DEVICES.items():
        how, kind = registry.compilation_of(name), registry.load(reference)
        assert (how.whole_steps, how.trial_steps > 0) == (kind.compiles_steps, kind.compiles_shapes)
        assert how.program is None or callable(registry.load(how.program))
    assert registry.compilation_of("neuron-native").whole_model == NeuronCompiler.whole_graph
    assert set(registry.COMPILATION) <= set(registry.DEVICES)


@pytest.fixture(scope="module", params=NAMES)
def device(request: pytest.FixtureRequest) -> Device:
    try:
        return select_alone(request.param)
    except UserError as error:
        pytest.skip(f"device {request.param} cannot be started here: {error}")


@dataclass(frozen=True)
class Pair(Batch):
    a: Tensor
    b: Tensor


def draw(device: Device, count: int = 100) -> list[float]:
    drawn: list[float] = torch.rand(count, device=device.torch_device).tolist()
    return drawn


def test_a_batch_arrives_whole(device: Device) -> None:
    batch = Pair(torch.arange(6).view(2, 3), torch.tensor([True, False]))
    moved = device.put(batch)
    assert moved.a.device.type == moved.b.device.type == device.torch_device.type
    assert torch.equal(moved.a.cpu(), batch.a)
    assert torch.equal(moved.b.cpu(), batch.b)


def test_what_is_random_is_decided_by_the_seed(device: Device) -> None:
    drawn = []
    for seed in (1, 1, 2):
        device.seed(seed)
        drawn.append(draw(device))
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_random_region_leaves_no_trace(device: Device) -> None:
    device.seed(1)
    expected = draw(device)
    device.seed(1)
    with device.random_region(2):
        inside = draw(device)
    assert draw(device) == expected
    device.seed(2)
    assert draw(device) == inside


def test_later_training_does_not_change_a_copy(device: Device) -> None:
    tensor = torch.arange(5.0, device=device.torch_device)
    copy = device.host_memory(tensor)
    device.copy_to_host([tensor], [copy])
    tensor.zero_()
    assert copy.tolist() == [0, 1, 2, 3, 4]
    assert copy.device.type == "cpu"


def test_closures_get_values_in_order(device: Device) -> None:
    seen: list[object] = []
    for value in (1.0, 2.0):
        device.step_closure(seen.append, torch.tensor([value], device=device.torch_device))
    device.finish_closures()
    assert seen == [[1.0], [2.0]]


def test_a_summary_shows_a_flipped_bit_and_what_is_not_finite(device: Device) -> None:
    tensor = torch.ones(1000, device=device.torch_device)
    ((before, is_finite),) = device.summaries([tensor])
    assert is_finite
    tensor.view(torch.int32)[17] ^= 1
    ((after, _),) = device.summaries([tensor])
    assert after != before
    tensor[3] = torch.inf
    assert device.summaries([tensor])[0][1] is False


def test_stochastic_rounding_gives_one_of_two_neighbours(device: Device) -> None:
    device.seed(1)
    x = torch.full((10_000,), 1 + 2**-9, device=device.torch_device)  # a quarter of the way to the next bf16 number
    rounded = device.round_stochastically(x)
    assert set(rounded.tolist()) == {1.0, 1 + 2**-7}
    share = (rounded > 1).double().mean().item()
    assert abs(share - 0.25) < 5 * (0.25 * 0.75 / 10_000) ** 0.5  # five standard deviations


def test_the_automatic_precision_is_one_that_can_be_asked_for(device: Device) -> None:
    precision, reason = device.automatic_precision()
    assert precision in PRECISIONS
    assert precision != "auto"
    assert reason
    assert device.describe()
