"""What surrounds Trainium, on the stand-in machine of `tests.helpers.neuron_machine`: its graphs run on XLA's CPU."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from common.errors import UserError
from tests.conftest import SET_BY_TORCH_XLA
from tests.helpers.neuron_machine import hardware, install_package, install_xla_lane, machine
from tests.helpers.support import (
    SELF_TEST_MODULES,
    TORCHRUN,
    assert_one_line_error,
    command,
    fork_server,
    losses,
    options,
    require_torch_xla,
    write_dataset,
    write_model_config,
)
from trainer.devices.base import DeviceOptions
from trainer.devices.neuron_cache import use_cache
from trainer.devices.neuron_host import check_workers, raise_open_files, visible_cores
from trainer.devices.neuron_lane import Installation
from trainer.devices.neuron_xla import (
    NeuronXlaDevice,
    bucket_bytes,
    environment,
    root_comm_id,
    settle,
)
from trainer.devices.xla import buckets
from trainer.parallel.mesh import Mesh


@pytest.fixture
def work(tmp_path: Path) -> list[str]:
    """The options of a short training."""
    data, model = write_dataset(tmp_path / "data", [40]), write_model_config(tmp_path, num_hidden_layers=1)
    return options(
        data_dir=data, model_config=model, output_dir=tmp_path / "out", device="neuron", batch_size=4,
        grad_accum_usteps=2, max_steps=3, warmup_steps=1, max_pred_len=5,
    )  # fmt: skip


@pytest.fixture(scope="module")
def forked_there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A machine whose commands are forked by a server that has imported torch_xla."""
    require_torch_xla()
    env = machine(tmp_path_factory.mktemp("machine"))
    with fork_server("torch_xla", *SELF_TEST_MODULES, PYTHONPATH=env["PYTHONPATH"]):
        yield {**SET_BY_TORCH_XLA, **env}


#: Our flags, as for a stage that has a cache.
OURS = "--model-type=transformer --cache_dir=/ours"


def test_the_variables_follow_precision_and_nodes() -> None:
    one = environment(DeviceOptions("fp32"), nodes=1, given={})
    assert one == {
        "NEURON_RT_STOCHASTIC_ROUNDING_EN": "0",
        "NEURON_RT_STOCHASTIC_ROUNDING_SEED": "0",
        "NEURON_CC_FLAGS": "--model-type=transformer --retry_failed_compilation",
        "NEURON_RT_EXEC_TIMEOUT": "600",
        "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "3",
        "NEURON_FUSE_SOFTMAX": "1",
        "ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB": "50",
    }
    for precision, rounding in (("bf16-sr", "1"), ("autocast-sr", "1"), ("bf16-master", "0"), ("auto", "0")):
        found = environment(DeviceOptions(precision), nodes=1, given={})
        assert found["NEURON_RT_STOCHASTIC_ROUNDING_EN"] == rounding
    for precision in ("autocast", "autocast-sr", "auto"):
        flags = environment(DeviceOptions(precision), nodes=1, cache=Path("/c"), given={})["NEURON_CC_FLAGS"].split()
        assert flags[2:] == ["--auto-cast=none", "--cache_dir=/c"]
    many = environment(DeviceOptions("fp32"), nodes=2, given={})
    assert many.items() - one.items() == {
        ("FI_PROVIDER", "efa"),
        ("FI_EFA_USE_DEVICE_RDMA", "1"),
        ("ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB", "512"),
    }


def test_each_job_on_a_machine_has_a_port_for_its_runtime() -> None:
    """The pipeline's ports are adjacent, torchrun's anywhere; ours is not another job's, nor one that Linux assigns."""
    ports = {}
    for port in (2020, 2021, 2022, 29500, 45123, 61000, 65535):
        host, _, chosen = root_comm_id("10.0.0.1", port).rpartition(":")
        assert host == "10.0.0.1"
        assert 60999 < int(chosen) < 65536
        assert int(chosen) != port
        ports[port] = chosen
    assert len(set(ports.values())) == len(ports)
    given = {"MASTER_ADDR": "fe80::1", "MASTER_PORT": "2020"}
    chosen = environment(DeviceOptions("fp32"), nodes=1, given=given)["NEURON_RT_ROOT_COMM_ID"]
    assert chosen == f"[fe80::1]:{ports[2020]}"  # the form that torch_xla's own default has
    assert root_comm_id("[fe80::1]", 2020) == chosen


@pytest.mark.parametrize("has_eth0", [True, False])
def test_in_a_pod_the_runtime_talks_over_its_interface(
    has_eth0: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.devices.neuron_xla._INTERFACES", tmp_path)
    if has_eth0:
        (tmp_path / "eth0").mkdir()
    pod = environment(DeviceOptions("fp32"), nodes=2, given={"KUBERNETES_SERVICE_HOST": "10.100.0.1"})
    assert pod.get("CCOM_SOCKET_IFNAME") == ("eth0" if has_eth0 else None)
    assert "CCOM_SOCKET_IFNAME" not in environment(DeviceOptions("fp32"), nodes=2, given={})


@pytest.mark.parametrize(
    ("limits", "raised", "line"),
    [
        (
            (1024, 4096),
            (4096, 4096),
            "ulimit -n 4096 (AWS advises 65535; on 'Too many open files' raise the hard limit)",
        ),
        ((1024, 90000), (65535, 90000), "ulimit -n 65535"),
        ((1024, resource.RLIM_INFINITY), (65535, resource.RLIM_INFINITY), "ulimit -n 65535"),
        ((70000, 90000), (70000, 90000), "ulimit -n 70000"),
        ((resource.RLIM_INFINITY,) * 2, (resource.RLIM_INFINITY,) * 2, "ulimit -n unlimited"),
    ],
)
def test_the_limit_of_open_files_is_raised_and_told(
    limits: tuple[int, int], raised: tuple[int, int], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {resource.RLIMIT_NOFILE: limits}
    monkeypatch.setattr(resource, "getrlimit", found.__getitem__)
    monkeypatch.setattr(resource, "setrlimit", found.__setitem__)
    assert raise_open_files() == line
    assert found == {resource.RLIMIT_NOFILE: raised}


def test_the_kernel_agrees_about_the_limit_of_open_files() -> None:
    code = "from trainer.devices.neuron_host import *; print(raise_open_files()[:14], resource.getrlimit(7))"
    done = command("-c", f"import resource; resource.setrlimit(7, (512, 600)); {code}")
    assert done.stdout == "ulimit -n 600  (600, 600)\n", done.stderr


@pytest.mark.parametrize("precision", ["autocast-sr", "bf16-sr"])
def test_hardware_that_does_not_round_is_refused(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a checkpoint of such a precision is resumed with `auto`, for which the runtime was set not to round."""
    device = NeuronXlaDevice.__new__(NeuronXlaDevice)
    monkeypatch.setenv("NEURON_RT_STOCHASTIC_ROUNDING_EN", "0")
    with pytest.raises(UserError, match=rf"{precision} needs NEURON_RT_STOCHASTIC_ROUNDING_EN=1, but it is 0; unset"):
        device.require_precision(precision)
    device.require_precision("autocast")
    with pytest.raises(UserError, match="fp64 on neuron-xla, which computes in fp32 at most"):
        device.require_precision("fp64")
    monkeypatch.setenv("NEURON_RT_STOCHASTIC_ROUNDING_EN", "1")
    for allowed in (precision, "autocast", "fp32"):  # the self-test of this precision compares it with fp32
        device.require_precision(allowed)
    device._rounds_regardless = True
    device.require_precision(precision)
    for other in ("autocast", "bf16-master", "fp32"):
        with pytest.raises(
            UserError, match=rf"STOCHASTIC_ROUNDING_EN=1, but precision {other} rounds to nearest; unset"
        ):
            device.require_precision(other)


@pytest.mark.slow
def test_rounding_that_contradicts_the_precision_is_refused(
    forked_there: dict[str, str], work: list[str], tmp_path: Path
) -> None:
    env = {**forked_there, "NEURON_RT_STOCHASTIC_ROUNDING_EN": "1"}
    for precision, status in (("autocast", 1), ("auto", 1), ("autocast-sr", 0)):
        given = options(precision=precision, output_dir=tmp_path / precision)
        done = command("-m", "trainer", *work, *given, env=env)
        assert done.returncode == status, done.stdout + done.stderr
        if status:
            assert_one_line_error(done, "NEURON_RT_STOCHASTIC_ROUNDING_EN=1, but precision autocast rounds to nearest")


@pytest.mark.slow
def test_autocast_computes_the_same_without_the_hardware(
    forked_there: dict[str, str], work: list[str], tmp_path: Path
) -> None:
    """With `autocast-sr` our graphs are those of `autocast`; XLA's CPU does not round stochastically."""
    curves = []
    for precision in ("autocast", "autocast-sr"):
        out = tmp_path / precision
        done = command("-m", "trainer", *work, "--precision", precision, "--output_dir", str(out), env=forked_there)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"NEURON_RT_STOCHASTIC_ROUNDING_EN={int(precision == 'autocast-sr')};" in done.stdout
        curves.append(losses(out))
    assert curves[0] == curves[1]


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
    """They are removed only while no other process uses the cache."""
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
        (4, None, {1, 2, 3, 4}),
        (6, None, {1, 2, 3, 4, 5, 6}),
    ],
)
def test_only_worker_counts_that_the_runtime_supports(total: int, visible: str | None, allowed: set[int]) -> None:
    for workers in range(1, total + 2):
        if workers in allowed:
            check_workers(workers, total, visible)
        else:
            with pytest.raises(UserError, match=rf"{workers} workers .*{total} NeuronCores.*nproc_per_node"):
                check_workers(workers, total, visible)


def test_the_peak_is_that_of_the_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NEURON_LOGICAL_NC_CONFIG", raising=False)
    device = NeuronXlaDevice.__new__(NeuronXlaDevice)
    for instance, peak in (("trn1.32xlarge", 95e12), ("trn2.48xlarge", 166.75e12), ("Standard PC", None)):
        monkeypatch.setattr(Installation, "of_machine", lambda: Installation({}, instance=instance))  # noqa: B023
        found = [device.peak_flops_per_s(precision) for precision in ("autocast", "bf16-sr", "bf16-master")]
        assert found == [peak] * 3
        assert device.peak_flops_per_s("fp32") is device.peak_flops_per_s("fp64") is None


def test_torchrun_and_the_runtime_must_see_the_same_workers() -> None:
    NeuronXlaDevice.check_worlds(Mesh(world_size=32), 32)
    with pytest.raises(UserError, match="started 32 workers, the Neuron runtime sees 1"):
        NeuronXlaDevice.check_worlds(Mesh(world_size=32), 1)


def test_a_machine_without_the_packages_says_where_they_are(work: list[str]) -> None:
    assert_one_line_error(
        command("-m", "trainer", *work), "torch-neuronx", "not installed", "pip install", "trainium.md"
    )


@pytest.mark.slow
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
    assert examined.stdout.splitlines()[-1].startswith("next    python -m pipeline init --for trn1 run && cd run")


@pytest.mark.slow
def test_the_device_trains_with_a_stand_in_runtime(work: list[str], tmp_path: Path) -> None:
    """One worker, its graphs on XLA's CPU: everything up to the first step happens in the real order. It is on the
    second machine, which has its own cache."""
    env = {
        **machine(tmp_path), "NEURON_RT_EXEC_TIMEOUT": "77", "NEURON_RT_VISIBLE_CORES": "0",
        "NEURON_CC_FLAGS": "--model-type=transformer -O1", "GROUP_RANK": "1",
    }  # fmt: skip
    done = command("-m", "trainer", *work, "--compile_cache", str(tmp_path / "cache"), env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NEURON_RT_EXEC_TIMEOUT=77 (yours; ours would be 600)" in done.stdout
    assert "NEURON_RT_STOCHASTIC_ROUNDING_EN=0;" in done.stdout
    flags = f"--retry_failed_compilation --auto-cast=none --cache_dir={tmp_path}/cache/node-1"
    assert f"NEURON_CC_FLAGS=--model-type=transformer -O1 {flags}" in done.stdout
    assert "precision autocast" in done.stdout
    assert (tmp_path / "out" / "checkpoints" / "ckpt_3" / "manifest.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_workers_meet_through_torch_xla_and_reduce(
    forked_there: dict[str, str], work: list[str], tmp_path: Path, tensor_parallel_size: int
) -> None:
    """torch_xla's own rendezvous and `xm.all_reduce`, which does nothing where XLA's world is 1: two workers' losses
    are those of one worker on the CPU, and their weights are compared before a checkpoint."""
    plain = options(precision="fp32", disable_dropout=True)
    cpu = command("-m", "trainer", *work, *plain, *options(device="cpu", output_dir=tmp_path / "cpu"), env=forked_there)
    assert cpu.returncode == 0, cpu.stdout + cpu.stderr
    two = options(
        tensor_parallel_size=tensor_parallel_size, grad_accum_usteps=tensor_parallel_size, output_dir=tmp_path / "two"
    )
    env = {**forked_there, "ALL_REDUCES": str(tmp_path / "log")}
    done = command(*TORCHRUN, *work, *plain, *two, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "cpu"), rtol=1e-5)
    assert (tmp_path / "log").exists()


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["autocast", "bf16-sr"])
def test_the_self_test_of_two_workers_passes(forked_there: dict[str, str], tmp_path: Path, precision: str) -> None:
    """Through the same rendezvous; nothing in it falls back to another device."""
    env = {**forked_there, "ALL_REDUCES": str(tmp_path / "log")}
    given = options(
        debug=True, vocab_size=100, batch_size=2, device="neuron", output_dir=tmp_path / "out", precision=precision
    )
    done = command("-m", "trainer", "--self-test", "--spawn", "2", *given, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 worker(s)" in done.stdout
    assert "self-test passed" in done.stdout.splitlines()[-1]
    assert (tmp_path / "log").exists()


@pytest.mark.slow
def test_a_runtime_that_sees_other_workers_is_refused(work: list[str], tmp_path: Path) -> None:
    """XLA's CPU sees one device in each process: torch_xla's rendezvous tells every worker that it is alone."""
    env = machine(tmp_path)
    (tmp_path / "site" / "torch_neuronx.py").write_text("")
    done = command(*TORCHRUN, *work, env=env)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "of 2, the process group of backend xla calls it 0 of 1; start all" in done.stderr


@pytest.mark.slow
def test_gradients_are_reduced_in_buckets_from_the_last_on() -> None:
    """In the graph that XLA gets: all-reduces of at most two floats each, unless a tensor is larger."""
    code = """
import os, re, torch, torch_xla, torch_xla.core.xla_model as xm
from trainer.devices.neuron_xla import NeuronXlaDevice
from trainer.parallel.mesh import Group
tensors = [torch.zeros(size).to("xla") for size in (1, 3, 1, 2)]
torch_xla.sync()
device = NeuronXlaDevice.__new__(NeuronXlaDevice)
device._xm, device._bucket_bytes = xm, 8
device.all_reduce(tensors, Group(2, [[0, 1]]))
graph = torch_xla._XLAC._get_xla_tensors_hlo(tensors)
for reduced in re.findall(r" all-reduce[(](.*?)[)], replica", graph):
    print(*re.findall(r"f32.([0-9]+).", reduced), flush=True)
os._exit(0)  # the graph cannot run here
"""
    done = command("-c", code, env={"PJRT_DEVICE": "CPU", "XLA_ALWAYS_ALLREDUCE": "1"})
    assert done.stdout.splitlines() == ["2", "1", "3", "1"], done.stdout + done.stderr


@pytest.mark.parametrize(
    ("sizes", "most", "found"),
    [
        ((2, 2, 2), 32, [(0, 2), (2, 3)]),
        ((9, 1, 1), 16, [(0, 1), (1, 3)]),
        ((1, 1, 9), 16, [(0, 2), (2, 3)]),
        ((1, 1), bucket_bytes("0"), [(0, 2)]),
        ((), 16, []),
    ],
)
def test_buckets_hold_no_more_than_they_may(sizes: tuple[int, ...], most: int, found: list[tuple[int, int]]) -> None:
    tensors = [torch.empty(size, dtype=torch.float64) for size in sizes]
    assert [(part.start, part.stop) for part in buckets(tensors, most)] == found


def test_the_size_of_a_bucket_is_a_whole_number() -> None:
    assert bucket_bytes("50") == 50 << 20
    with pytest.raises(UserError, match="ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB=5MB is not a whole number; write 50"):
        bucket_bytes("5MB")
