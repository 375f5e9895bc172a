"""The native lane on a stand-in for torch-neuronx: a torch device whose operations run on the CPU's kernels."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from common.errors import UserError
from tests.helpers.neuron_machine import machine
from tests.helpers.support import (
    SELF_TEST_MODULES,
    assert_one_line_error,
    command,
    fork_server,
    losses,
    options,
    require_torch_xla,
    train,
    write_dataset,
    write_model_config,
)
from tests.standins.neuron_native.machine import native_machine
from trainer import registry
from trainer.devices.base import DeviceOptions
from trainer.devices.cpu import CpuDevice
from trainer.devices.neuron_native import NeuronCompiler, NeuronNativeDevice
from trainer.devices.select import select
from trainer.parallel.mesh import Mesh


@pytest.fixture
def autoloading(tmp_path: Path, native_library: Path) -> dict[str, str]:
    """A machine on which each command runs in a new interpreter."""
    return native_machine(tmp_path / "machine", native_library)


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory, native_library: Path) -> Iterator[dict[str, str]]:
    """A machine whose commands are forked, and then import the package."""
    env = native_machine(tmp_path_factory.mktemp("machine"), native_library)
    with fork_server(*SELF_TEST_MODULES, PYTHONPATH=env["PYTHONPATH"]):
        yield env


def train_there(env: dict[str, str], workers: int = 1, **given: object) -> subprocess.CompletedProcess[str]:
    """`python -m trainer` on that machine, its workers started as torchrun would, or by --spawn if that is `given`."""
    if workers > 1 and "spawn" not in given:
        return train(workers, env=env, **given)
    return command("-m", "trainer", *options(**given), env=env)


@pytest.fixture
def work(tmp_path: Path) -> dict[str, object]:
    data, model = write_dataset(tmp_path / "data", [60]), write_model_config(tmp_path, num_hidden_layers=1)
    return {
        "data_dir": data, "model_config": model, "batch_size": 4, "max_steps": 6, "warmup_steps": 1, "max_pred_len": 5,
        "precision": "fp32", "lr": 1e-3, "grad_accum_usteps": 2,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "more"),
    [
        (1, {"compile": True}),
        (1, {"optimizer": "Muon"}),
        (2, {"spawn": 2}),
        (2, {"tensor_parallel_size": 2}),
        (2, {"data_parallel": "ddp"}),
    ],
    ids=["compiled", "Muon", "2 workers", "tensor-parallel", "ddp"],
)
def test_the_losses_are_the_cpus(
    native: dict[str, str], work: dict[str, object], tmp_path: Path, workers: int, more: dict[str, object]
) -> None:
    """Without dropout, which each device draws in its own way."""
    replicas = workers // int(str(more.get("tensor_parallel_size", 1)))
    given = {**work, "disable_dropout": True, "optimizer": more.get("optimizer", "AdamW")}
    assert train(env=native, **given, device="cpu", output_dir=tmp_path / "cpu").returncode == 0
    done = train_there(
        native, workers, **{**given, **more, "grad_accum_usteps": 2 // replicas}, device="neuron",
        output_dir=tmp_path / "neuron",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "device neuron-native, since torch-neuronx 2.14.3.0.1 is native" in done.stdout
    expected, found = losses(tmp_path / "cpu"), losses(tmp_path / "neuron")
    assert len(found) == 6
    # Sums in another order, divided afterwards instead of before: a few fp32 roundings (6e-8) of losses near 6.
    assert max(abs(a - b) for a, b in zip(expected, found, strict=True)) < 1e-6 * max(expected)


@pytest.mark.slow
@pytest.mark.parametrize("draws_on_host", ["0", "1"])
def test_dropout_is_seeded_whichever_generator_it_draws_from(autoloading: dict[str, str], draws_on_host: str) -> None:
    program = """
from types import SimpleNamespace
import torch
from trainer.devices.select import select_alone
from trainer.machine.randomness import check_dropout_independence, check_dropout_rate
device = select_alone("neuron")
subject = SimpleNamespace(device=device, devices={"eager": device}, config=SimpleNamespace(precision="bf16-sr"))
findings = [*check_dropout_rate(subject), *check_dropout_independence(subject)]
print(len(findings), [finding for finding in findings if not finding.passed])
"""
    done = command("-c", program, env={**autoloading, "STANDIN_DRAWS_ON_HOST": draws_on_host})
    assert done.stdout == "62 []\n", done.stdout + done.stderr


@pytest.mark.slow
def test_operations_on_the_cpu_are_refused_unless_they_are_named(
    native: dict[str, str], work: dict[str, object], tmp_path: Path
) -> None:
    given = {**work, "device": "neuron-native"}
    env = {**native, "STANDIN_FALLBACKS": "aten::gelu,aten::never_run"}
    refused = train_there(env, **given, output_dir=tmp_path / "refused")
    assert_one_line_error(refused, "aten::gelu ran on the CPU", "--allow_fallbacks aten::gelu")
    assert "never_run" not in refused.stdout
    allowed = train_there(env, **given, output_dir=tmp_path / "allowed", allow_fallbacks="aten::gelu")
    assert allowed.returncode == 0, allowed.stdout


@pytest.mark.slow
def test_precompile_is_a_warm_up_whose_graphs_training_is_held_to(
    autoloading: dict[str, str], work: dict[str, object], tmp_path: Path
) -> None:
    out = tmp_path / "compiled"
    given = {**work, "device": "neuron", "compile": True}
    done = command(
        "-m", "stages.precompile", "--out", str(out), "--device", "neuron", "--compile", "--no-self-test", "--", "-m",
        "trainer", *options(**given), env={**autoloading, "TORCH_NEURONX_NEFF_CACHE_DIR": "/nowhere"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    cache, graphs = out / "cache", out / "graphs.json"
    compiled = sorted((cache / "node-0" / "neff").rglob("model.neff"))
    assert len(compiled) == 2  # forward and backward
    times = [path.stat().st_mtime_ns for path in compiled]

    held = {**given, "graphs": graphs, "compile_cache": cache}
    trained = train_there(autoloading, **held, output_dir=tmp_path / "same")
    assert trained.returncode == 0, trained.stdout
    assert "warning" not in trained.stdout
    assert sorted((cache / "node-0" / "neff").rglob("model.neff")) == compiled
    assert times == [path.stat().st_mtime_ns for path in compiled]
    other = train_there(autoloading, **{**held, "batch_size": 2}, output_dir=tmp_path / "other")
    assert "is not in" in other.stdout, other.stdout


@pytest.mark.slow
def test_a_machine_that_computes_wrongly_is_not_compiled_for(
    native: dict[str, str], work: dict[str, object], tmp_path: Path
) -> None:
    out = tmp_path / "work" / "compiled"
    words = ["-m", "stages.precompile", "--out", str(out), "--device", "neuron", "--", "-m", "trainer"]
    words += options(**work, device="neuron", seq_len=32, disable_dropout=True)
    failed = command(*words, env={**native, "STANDIN_STUCK_SEED": "1"})
    assert_one_line_error(failed, "failed its self-test", "docs/trainium.md", "--no-self-test")
    assert "dropout independence" in failed.stdout
    assert not (out / "graphs.json").exists()
    (record,) = (tmp_path / "work" / "self-tests").iterdir()
    found = json.loads(record.read_text())
    assert not found["passed"]
    assert found["kind"]["torch-neuronx"] == "2.14.3.0.1"
    # A machine that has passed is not tested again.
    record.write_text(json.dumps({**found, "passed": True}))
    done = command(*words, env=native)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed before on this kind of machine" in done.stderr
    assert json.loads(record.read_text())["passed"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "more", "words"),
    [
        (1, {"precision": "fp64"}, ["precision fp64 on neuron-native"]),
        (3, {"spawn": 3}, ["asks for NeuronCore 2, but torch sees 2"]),
        (1, {"device": "neuron-xla"}, ["device neuron-xla, but torch-neuronx 2.14.3.0.1 is native", "choose device"]),
    ],
)
def test_what_the_lane_cannot_do_is_refused(
    native: dict[str, str], work: dict[str, object], tmp_path: Path, workers: int, more: dict[str, object],
    words: list[str],
) -> None:  # fmt: skip
    given = {**work, "device": "neuron-native", **more}
    refused = train_there(native, workers, **given, output_dir=tmp_path / "out")
    assert refused.returncode == 1
    for word in words:
        assert word in refused.stdout + refused.stderr
    assert "Traceback" not in refused.stdout + refused.stderr


@pytest.mark.slow
def test_the_native_lane_is_not_trained_with_the_other_ones_packages(work: dict[str, object], tmp_path: Path) -> None:
    require_torch_xla()
    refused = train_there(machine(tmp_path / "machine"), **work, device="neuron-native", output_dir=tmp_path / "out")
    assert_one_line_error(refused, "device neuron-native, but torch-neuronx 2.9", "choose device neuron-xla")


def test_the_first_loss_is_not_scaled_before_the_backward_pass() -> None:
    """A second one is, relative to it; the factors and the division together make means."""
    factors = NeuronNativeDevice.loss_factors(NeuronNativeDevice.__new__(NeuronNativeDevice), [301])
    assert factors == ([1.0], 301)
    before, after = NeuronNativeDevice.loss_factors(NeuronNativeDevice.__new__(NeuronNativeDevice), [301, 16])
    means = [factor / after for factor in before]
    assert torch.allclose(
        torch.tensor(means, dtype=torch.float64), torch.tensor([1 / 301, 1 / 16], dtype=torch.float64)
    )
    assert NeuronNativeDevice.loss_factors(NeuronNativeDevice.__new__(NeuronNativeDevice), [0]) == ([1.0], 1)


class _AnyMachine(CpuDevice):
    """Compiles as the native lane does."""

    def make_compiler(self, cache: str | None) -> NeuronCompiler:
        return NeuronCompiler()


def test_a_model_that_workers_share_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their sums cannot be part of the one graph that this lane compiles; a whole model is compiled."""
    monkeypatch.setattr(registry, "load", lambda reference: _AnyMachine)
    options = DeviceOptions(compile=True)
    with pytest.raises(
        UserError, match="one graph of the model on --device neuron-native.*_size 2 workers.* leave compile"
    ):
        select("neuron-native", Mesh(world_size=2, tensor_parallel_size=2), options)
    assert select("neuron-native", Mesh(), options).compiler is not None
    assert select("neuron-native", Mesh(world_size=2, tensor_parallel_size=2), DeviceOptions()).compiler is None


@pytest.mark.slow
def test_the_compilers_flags_name_no_cache(native: dict[str, str], work: dict[str, object], tmp_path: Path) -> None:
    """Left over from the other lane: every compilation would end with it."""
    env = {**native, "NEURON_CC_FLAGS": "-O1 --cache_dir=/theirs"}
    refused = train_there(env, **work, device="neuron", output_dir=tmp_path / "out")
    assert_one_line_error(refused, "NEURON_CC_FLAGS has --cache_dir=/theirs", "remove it")
    examined = command("-m", "trainer", "--doctor", env=env)
    assert "missing NEURON_CC_FLAGS has --cache_dir=/theirs" in examined.stdout, examined.stderr


@pytest.mark.slow
def test_the_self_test_of_two_workers_compares_what_is_compiled(native: dict[str, str], tmp_path: Path) -> None:
    """And the workers' sums. An operation that ran on the CPU ends none of its trainings: that has a check."""
    given = options(
        debug=True, vocab_size=100, seq_len=32, max_pred_len=5, batch_size=2, device="neuron",
        output_dir=tmp_path / "out",
    )  # fmt: skip
    env = {**native, "STANDIN_FALLBACKS": "aten::gelu"}
    done = command("-m", "trainer", "--self-test", "--spawn", "2", *given, env=env)
    assert done.returncode == 1, done.stdout + done.stderr
    record = json.loads((tmp_path / "out" / "self-test.json").read_text())
    checks = record["checks"]
    assert [name for name, check in checks.items() if not check["passed"]] == ["fallbacks"], done.stdout
    assert record["workers"] == 2
    for name, groups in {"collectives": {"data-parallel group"}, "gradients": {"eager", "compiled"}}.items():
        measured = {found["what"].split(",")[0] for found in checks[name]["findings"] if found["measured"] is not None}
        assert groups <= measured


@pytest.mark.slow
def test_the_device_is_not_used_before_the_process_group(autoloading: dict[str, str]) -> None:
    """As AWS requires; the stand-in counts what has been allocated, and refuses workers that use it too early."""
    program = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (512, 600))
import torch, torch_neuronx
from trainer.devices.base import DeviceOptions
from trainer.devices.select import select
from trainer.parallel.mesh import Mesh
device = select("neuron", Mesh(world_size=2, local_world_size=2), DeviceOptions(compile=True))
print(torch.neuron.max_memory_allocated(), device.torch_device, *resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    done = command("-c", program, env={**autoloading, "WORLD_SIZE": "2"})
    assert done.stdout.split() == ["0", "neuron:0", "600", "600"], done.stderr


@pytest.mark.slow
def test_doctor_tells_the_lane(native: dict[str, str]) -> None:
    examined = command("-m", "trainer", "--doctor", env=native)
    assert "lane    neuron-native: torch-neuronx 2.14.3.0.1 is native" in examined.stdout, examined.stderr
    missing = [line for line in examined.stdout.splitlines() if line.startswith("missing")]
    if sys.version_info < (3, 12):
        assert ["neuron-native is made for Python 3.12 to 3.14" in line for line in missing] == [True]
    else:
        assert not missing
        assert examined.stdout.splitlines()[-1].startswith("next    python -m pipeline init --for trn2 run && cd run")
