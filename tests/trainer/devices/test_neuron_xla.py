"""What is around Trainium, on the stand-in machine of `tests.helpers.neuron_machine`: its graphs run on XLA's CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.errors import UserError
from tests.helpers.neuron_machine import hardware, install_package, install_xla_lane, machine
from tests.helpers.support import assert_one_line_error, command, options, write_dataset, write_model_config
from trainer.devices.base import DeviceOptions
from trainer.devices.neuron_cache import use_cache
from trainer.devices.neuron_xla import NeuronXlaDevice, check_workers, environment, settle, visible_cores
from trainer.parallel.mesh import Mesh


@pytest.fixture
def work(tmp_path: Path) -> list[str]:
    """The options of a short training."""
    data, model = write_dataset(tmp_path / "data", [40]), write_model_config(tmp_path)
    return options(
        data_dir=data, model_config=model, output_dir=tmp_path / "out", device="neuron", batch_size=4,
        grad_accum_usteps=2, max_steps=3, warmup_steps=1, max_pred_len=5,
    )  # fmt: skip


#: Flags of ours, as for a stage that has a cache.
OURS = "--model-type=transformer --cache_dir=/ours"


def test_the_variables_follow_precision_and_nodes() -> None:
    one = environment(DeviceOptions("fp32"), nodes=1)
    assert one == {
        "NEURON_RT_STOCHASTIC_ROUNDING_EN": "0",
        "NEURON_RT_STOCHASTIC_ROUNDING_SEED": "0",
        "NEURON_CC_FLAGS": "--model-type=transformer --retry_failed_compilation",
        "NEURON_RT_EXEC_TIMEOUT": "600",
    }
    assert environment(DeviceOptions("bf16-sr"), nodes=1)["NEURON_RT_STOCHASTIC_ROUNDING_EN"] == "1"
    for precision in ("autocast", "auto"):
        flags = environment(DeviceOptions(precision), nodes=1, cache=Path("/c"))["NEURON_CC_FLAGS"].split()
        assert flags[2:] == ["--auto-cast=none", "--cache_dir=/c"]
    many = environment(DeviceOptions("fp32"), nodes=2)
    assert many.items() - one.items() == {
        ("FI_PROVIDER", "efa"),
        ("FI_EFA_USE_DEVICE_RDMA", "1"),
    }


def test_the_runtime_rounds_where_it_can() -> None:
    """Nothing is left for the optimizer to do."""
    x = torch.randn(10)
    assert NeuronXlaDevice.round_stochastically(NeuronXlaDevice.__new__(NeuronXlaDevice), x) is x


def test_the_users_variables_win_and_that_is_said() -> None:
    ours, lines = settle({"NEURON_RT_EXEC_TIMEOUT": "600", "FI_PROVIDER": "efa"}, {"NEURON_RT_EXEC_TIMEOUT": "90"})
    assert ours == {"FI_PROVIDER": "efa"}
    assert lines == ["NEURON_RT_EXEC_TIMEOUT=90 (yours; ours would be 600)", "FI_PROVIDER=efa"]


@pytest.mark.parametrize(
    ("theirs", "merged", "remark"),
    [
        ("", f"{OURS}", None),
        ("-O1 --x='a b'", f"-O1 --x='a b' {OURS}", None),
        ("--model-type=generic", "--model-type=generic --cache_dir=/ours", "your --model-type=generic instead of"),
        ("--model-type=transformer -O2", "--model-type=transformer -O2 --cache_dir=/ours", None),
        ("-O1 --cache_dir=/theirs", f"-O1 {OURS}", "your --cache_dir=/theirs is not used"),
        ("--cache_dir /theirs -O1", f"-O1 {OURS}", "your --cache_dir=/theirs is not used"),
        ("--cache_dir=/ours", OURS, None),
    ],
)
def test_compiler_flags_are_merged_one_by_one(theirs: str, merged: str, remark: str | None) -> None:
    chosen, (line,) = settle({"NEURON_CC_FLAGS": OURS}, {"NEURON_CC_FLAGS": theirs})
    assert chosen == {"NEURON_CC_FLAGS": merged}
    assert line.startswith(f"NEURON_CC_FLAGS={merged}")
    assert (remark in line) if remark else line == f"NEURON_CC_FLAGS={merged}"


def test_without_a_cache_of_ours_theirs_stays() -> None:
    chosen, _ = settle({"NEURON_CC_FLAGS": "--model-type=transformer"}, {"NEURON_CC_FLAGS": "--cache_dir=/theirs"})
    assert chosen == {"NEURON_CC_FLAGS": "--cache_dir=/theirs --model-type=transformer"}


def test_stale_locks_go_and_held_ones_stay(tmp_path: Path) -> None:
    """Removed only while no other process works with the cache."""
    lock = tmp_path / "neuronxcc-2.0" / "MODULE_1+a" / "model.hlo_module.pb.lock"
    lock.parent.mkdir(parents=True)
    kept = lock.with_name("model.neff")
    for path in (lock, kept):
        path.touch()
    said: list[str] = []
    with use_cache(tmp_path, said.append):
        assert not lock.exists()
        assert str(lock) in said[0]
        lock.touch()
        with use_cache(tmp_path, said.append):
            assert lock.exists()
    with use_cache(tmp_path, said.append):
        assert not lock.exists()
    assert kept.exists()
    assert len(said) == 2


@pytest.mark.parametrize("name", ["XLA_USE_BF16", "XLA_DOWNCAST_BF16"])
def test_variables_that_no_longer_work_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=rf"{name}=1 .*unset it.*--precision autocast"):
        settle({}, {name: "1"})
    assert settle({}, {name: "0"}) == ({}, [])


@pytest.mark.parametrize(("value", "count"), [("0-7", 8), ("3", 1), ("0,2,4-5", 4)])
def test_visible_cores_are_counted(value: str, count: int) -> None:
    assert visible_cores(value) == count


@pytest.mark.parametrize("value", ["", "a", "3-1", "0-"])
def test_bad_visible_cores_are_refused(value: str) -> None:
    with pytest.raises(UserError, match="NEURON_RT_VISIBLE_CORES=.*write 0-7"):
        visible_cores(value)


@pytest.mark.parametrize(
    ("total", "visible", "allowed"),
    [
        (2, None, {1, 2}),
        (32, None, {1, 2, 8, 32}),
        (32, "0-7", {1, 2, 8}),
        (64, None, {1, 64}),
        (4, None, {1, 2, 3, 4}),
    ],
)
def test_only_worker_counts_that_the_runtime_supports(total: int, visible: str | None, allowed: set[int]) -> None:
    for workers in range(1, total + 2):
        if workers in allowed:
            check_workers(workers, total, visible)
        else:
            with pytest.raises(UserError, match=rf"{workers} workers .*{total} NeuronCores.*nproc_per_node"):
                check_workers(workers, total, visible)


def test_torchrun_and_the_runtime_must_see_the_same_workers() -> None:
    NeuronXlaDevice.check_worlds(Mesh(world_size=32), 32)
    with pytest.raises(UserError, match="started 32 workers, the Neuron runtime sees 1"):
        NeuronXlaDevice.check_worlds(Mesh(world_size=32), 1)


def test_a_machine_without_the_packages_says_where_they_are(work: list[str]) -> None:
    assert_one_line_error(
        command("-m", "trainer", *work), "torch-neuronx", "not installed", "pip install", "trainium.md"
    )


def test_packages_that_hold_nothing_are_recognised(work: list[str], tmp_path: Path) -> None:
    """The text is that of the public registry's torch-neuronx 1.0."""
    about = "WRONG PACKAGE. Please install the package from Neuron Repository"
    install_package(tmp_path / "site", "torch_neuronx", "1.0", about)
    env = hardware(tmp_path, cores=[2])
    assert_one_line_error(command("-m", "trainer", *work, env=env), "torch-neuronx 1.0", "empty stand-ins", "uninstall")
    examined = command("-m", "trainer", "--doctor", env=env)
    assert examined.returncode == 1
    assert "pip uninstall -y torch-neuronx" in examined.stdout
    assert "2 NeuronCores" in examined.stdout


def test_the_doctor_gives_the_next_command(tmp_path: Path) -> None:
    install_xla_lane(tmp_path / "site")
    examined = command("-m", "trainer", "--doctor", env=hardware(tmp_path, cores=[2] * 16))
    assert examined.returncode == 0, examined.stdout + examined.stderr
    assert "32 NeuronCores" in examined.stdout
    assert examined.stdout.splitlines()[-1].startswith("next    LUIGI_CONFIG_PATH=configs/trn1-bert-large.cfg luigi")


def test_the_device_trains_with_a_stand_in_runtime(work: list[str], tmp_path: Path) -> None:
    """One worker, its graphs on XLA's CPU: the order of things up to the first step is the real one."""
    env = {
        **machine(tmp_path), "NEURON_RT_EXEC_TIMEOUT": "77", "NEURON_RT_VISIBLE_CORES": "0",
        "NEURON_CC_FLAGS": "--model-type=transformer -O1",
    }  # fmt: skip
    done = command("-m", "trainer", *work, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NEURON_RT_EXEC_TIMEOUT=77 (yours; ours would be 600)" in done.stdout
    assert "NEURON_RT_STOCHASTIC_ROUNDING_EN=0;" in done.stdout
    assert "NEURON_CC_FLAGS=--model-type=transformer -O1 --retry_failed_compilation --auto-cast=none" in done.stdout
    assert "precision autocast" in done.stdout
    assert (tmp_path / "out" / "checkpoints" / "ckpt_3" / "manifest.json").exists()
