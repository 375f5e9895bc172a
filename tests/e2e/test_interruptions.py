"""Signals, crashes and hangs, through the real luigi, launcher and torchrun."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from common.forked import start_python
from common.process import SAVING_S
from tests.helpers.chain import LUIGI, Chain, prepared_chain, start_luigi
from tests.helpers.support import (
    ROOT,
    TORCHRUN,
    assert_same_bytes,
    metrics,
    options,
    start_fork_server,
    write_dataset,
    write_model_config,
)

pytestmark = pytest.mark.slow

#: So many steps that a signal sent after the first few arrives in the middle.
LONG = ("--Phase1-max-steps", "100000", "--Phase1-ckpt-interval-steps", "0")
#: (workers, how many of them share a model)
LAYOUTS = ((1, 1), (2, 1), (2, 2))


def cluster(workers: int, size: int) -> tuple[str, ...]:
    return ("--Cluster-nproc-per-node", str(workers), "--Cluster-tensor-parallel-size", str(size))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """One for all tests of this module, each of which trains with settings of its own."""
    return prepared_chain(tmp_path_factory).copy(tmp_path_factory.mktemp("chain"))


@pytest.fixture
def start(prepared: Chain) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `luigi Pretrain --phase 1 words…` in the background; whatever is left of it is killed afterwards."""
    started: list[subprocess.Popen[str]] = []

    def begin(*words: str, **env: str) -> subprocess.Popen[str]:
        process = start_luigi(
            prepared.config, "Pretrain", "--phase", "1", *words,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **env,
        )  # fmt: skip
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def wait_for(what: Callable[[], object], timeout: float = SAVING_S + 60) -> None:
    deadline = time.monotonic() + timeout
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def training_directory(chain: Chain, lr: float) -> Path:
    """The one directory in which a training with this learning rate (each test has its own) is running."""

    def find() -> list[Path]:
        manifests = chain.work.glob("pretrain-phase1-*/stage.json")
        return [path.parent for path in manifests if f'"lr": {lr},' in path.read_text()]

    wait_for(find)
    (directory,) = find()
    wait_for(lambda: (directory / "metrics.jsonl").exists() and len(metrics_so_far(directory)) > 3)
    return directory


def metrics_so_far(directory: Path) -> list[str]:
    return (directory / "metrics.jsonl").read_text().splitlines()


def ours(marker: str) -> list[psutil.Process]:
    """Processes whose command line names `marker`."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(marker in word for word in process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.mark.parametrize(
    ("signum", "layout"),
    [*((signal.SIGTERM, layout) for layout in LAYOUTS), (signal.SIGINT, (2, 1)), (signal.SIGHUP, (2, 2))],
)
def test_a_stopped_run_has_saved_its_last_step(prepared, start, layout: tuple[int, int], signum: int) -> None:  # type: ignore[no-untyped-def]
    lr = (sum(layout) + signum / 100) / 1000
    process = start(*LONG, "--Phase1-lr", str(lr), *cluster(*layout))
    directory = training_directory(prepared, lr)
    process.send_signal(signum)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert "Traceback" not in output
    steps = [record["step"] for record in metrics(directory)]
    (newest,) = {int(p.name[5:]) for p in (directory / "checkpoints").iterdir()} & {steps[-1]}
    assert steps == list(range(1, newest + 1))
    assert not ours(str(directory))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_left_of_a_killed_luigi(prepared, start, layout: tuple[int, int]) -> None:  # type: ignore[no-untyped-def]
    process = start(*LONG, "--Phase1-lr", f"0.01{sum(layout)}", *cluster(*layout))
    directory = training_directory(prepared, float(f"0.01{sum(layout)}"))
    assert len(ours(str(directory))) >= layout[0]
    process.kill()
    process.wait()
    wait_for(lambda: not ours(str(directory)))


def test_nothing_is_left_of_a_killed_torchrun(prepared, start) -> None:  # type: ignore[no-untyped-def]
    process = start(*LONG, "--Phase1-lr", "0.02", "--Cluster-nproc-per-node", "2")
    directory = training_directory(prepared, 0.02)
    (launcher,) = [p for p in ours(str(directory)) if "trainer.launch.torchrun" in " ".join(p.cmdline())]
    workers = [process for process in ours(str(directory)) if process != launcher]
    assert len(workers) == 2
    # luigi would restart it; stop luigi before it gets that far.
    process.send_signal(signal.SIGSTOP)
    launcher.kill()
    wait_for(lambda: not any(w.is_running() and w.status() != psutil.STATUS_ZOMBIE for w in workers))


def killed_at(directory: Path, victim: psutil.Process) -> int:
    """Kill a process; returns the number of steps recorded by then. Records are written once a second."""
    wait_for(lambda: len(metrics_so_far(directory)) > 20)
    victim.kill()
    return len(metrics_so_far(directory))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_killed_luigi_loses_no_step(prepared, start, layout: tuple[int, int]) -> None:  # type: ignore[no-untyped-def]
    """The next one waits until the workers have saved, and resumes from there: the next checkpoint is far off."""
    lr = float(f"0.03{sum(layout)}")
    words = (*LONG, "--Phase1-lr", str(lr), *cluster(*layout))
    process = start(*words)
    directory = training_directory(prepared, lr)
    steps = killed_at(directory, psutil.Process(process.pid))
    again = start(*words)
    wait_for(lambda: "resuming from checkpoint" in (directory / "stage.log").read_text())
    again.send_signal(signal.SIGTERM)
    output, _ = again.communicate(timeout=60)
    assert again.returncode == 75, output
    (resumed,) = map(int, re.findall(r"resuming from checkpoint \S*/ckpt_(\d+)", output))
    assert resumed >= steps
    recorded = [record["step"] for record in metrics(directory)]
    assert recorded == list(range(1, len(recorded) + 1))


def test_a_killed_launcher_loses_no_step(prepared, start) -> None:  # type: ignore[no-untyped-def]
    process = start(*LONG, "--Phase1-lr", "0.04", *cluster(2, 1))
    directory = training_directory(prepared, 0.04)
    (launcher,) = [one for one in ours(str(directory)) if "trainer.launch.torchrun" in " ".join(one.cmdline())]
    steps = killed_at(directory, launcher)
    wait_for(lambda: "resuming from checkpoint" in (directory / "stage.log").read_text())
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert "starting again" in output
    (resumed,) = map(int, re.findall(r"resuming from checkpoint \S*/ckpt_(\d+)", output))
    assert resumed >= steps
    recorded = [record["step"] for record in metrics(directory)]
    assert recorded == list(range(1, len(recorded) + 1))


@pytest.mark.parametrize("size", [1, 2])
def test_a_killed_worker_is_replaced_and_the_bytes_are_the_same(prepared, start, tmp_path: Path, size: int) -> None:  # type: ignore[no-untyped-def]
    token = tmp_path / "token"
    token.touch()
    words = ("--Phase1-lr", f"0.003{size}", *cluster(2, size))
    process = start(*words, FAILPOINT="micro-step:5.0.1", FAILPOINT_TOKEN=str(token))
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert "starting again" in output
    assert not token.exists()
    killed = prepared.latest("pretrain-phase1")
    again = start(*words, "--Run-work-dir", str(tmp_path / "work"))
    output, _ = again.communicate(timeout=120)
    assert again.returncode == 0, output
    straight = (tmp_path / "work" / "latest" / "pretrain-phase1").resolve()
    assert straight.name == killed.name
    assert_same_bytes(killed / "checkpoints" / "ckpt_8", straight / "checkpoints" / "ckpt_8")


@pytest.mark.parametrize("size", [1, 2])
def test_a_stopped_worker_is_noticed(prepared, start, tmp_path: Path, size: int) -> None:  # type: ignore[no-untyped-def]
    token = tmp_path / "token"
    token.touch()
    # After step 6, whose checkpoint waits until that of step 3 is written: there is one to resume from.
    process = start(
        *("--Phase1-lr", f"0.004{size}", *cluster(2, size), "--Cluster-hang-timeout-s", "12"),
        FAILPOINT="micro-step:7.0.1", FAILPOINT_TOKEN=str(token), FAILPOINT_ACTION="stop",
    )  # fmt: skip
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert "no sign of life for 12.0 s" in output
    assert "resuming from checkpoint" in output
    assert not ours(str(prepared.latest("pretrain-phase1"))), "the stopped worker is killed, not left behind"


def test_a_crash_loop_ends_with_the_workers_own_traceback(prepared, start) -> None:  # type: ignore[no-untyped-def]
    process = start("--Phase1-lr", "0.005", FAILPOINT="step:5.0", FAILPOINT_ACTION="raise")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 30, output
    # Three restarts from where it got to. If the first crashes lose checkpoint 3's write, none may start from it.
    from_checkpoint = output.count("resuming from checkpoint")
    from_the_start = output.count("starting again") + 1 - from_checkpoint
    assert (from_the_start in (1, 2, 3, 4) and from_checkpoint == 3) or (from_the_start, from_checkpoint) == (4, 0)
    last = output[output.rindex("pretrain-phase1 failed:") :]
    assert "RuntimeError: failpoint step:5.0" in last
    assert 'trainer/loop.py", line' in last


def test_of_20_simultaneous_starts_one_runs(prepared: Chain, tmp_path: Path) -> None:
    words = [*LUIGI, "Pretrain", "--phase", "1", *LONG, "--Phase1-lr", "0.006"]
    environment = {**os.environ, "LUIGI_CONFIG_PATH": str(prepared.config)}
    start_fork_server()
    starts = []
    for number in range(20):
        with (tmp_path / str(number)).open("wb") as output:
            starts.append(start_python(words, environment=environment, output=output.fileno(), directory=ROOT))
    wait_for(lambda: sum(process.poll() is None for process in starts) == 1, timeout=300)
    (running,) = [process for process in starts if process.poll() is None]
    for number, process in enumerate(starts):
        if process is not running:
            said = (tmp_path / str(number)).read_text()
            assert process.returncode == 10, said
            assert f"is being made by process {running.pid} on " in said
            assert "Traceback" not in said
    directory = training_directory(prepared, 0.006)
    os.kill(running.pid, signal.SIGTERM)
    assert running.wait(60) == 75, (tmp_path / str(starts.index(running))).read_text()
    steps = [record["step"] for record in metrics(directory)]
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.parametrize("is_forked", [True, False])
def test_workers_do_not_outlive_a_launcher_killed_while_they_start(tmp_path: Path, is_forked: bool) -> None:
    """Their parent dies before they have asked to die with it: they notice."""
    out = tmp_path / "out"
    values = {"data_dir": write_dataset(tmp_path / "data", [40]), "model_config": write_model_config(tmp_path),
              "output_dir": out, "max_pred_len": 5, "grad_accum_usteps": 1}  # fmt: skip
    # New interpreters take a second to start.
    (tmp_path / "sitecustomize.py").write_text("import os, time\nif 'RANK' in os.environ: time.sleep(1)\n")
    if not is_forked:  # torch would import a device's package, so no process is forked
        device = tmp_path / "device-1.dist-info"
        device.mkdir()
        (device / "METADATA").write_text("Metadata-Version: 2.1\nName: device\nVersion: 1\n")
        (device / "entry_points.txt").write_text("[torch.backends]\ndevice = device:autoload\n")
    launcher = subprocess.Popen(
        [sys.executable, *TORCHRUN, *options(**values)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        stdout=subprocess.DEVNULL,
    )
    with launcher:
        try:
            wait_for(lambda: len([process for process in ours(str(out)) if process.pid != launcher.pid]) == 2)
            (parent,) = {process.ppid() for process in ours(str(out)) if process.pid != launcher.pid}
            assert (parent != launcher.pid) == is_forked
        finally:
            launcher.kill()
    wait_for(lambda: not ours(str(out)))
