"""Fixtures that every test may use."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.helpers.support import command, fork_server, require_torch_xla, start_fork_server, stop_fork_servers
from tests.interpreter import interpret_kernels

# One thread per process, here and in all that is started: many tests run in parallel. Read when torch is loaded.
os.environ["OMP_NUM_THREADS"] = "1"
# XLA's compiler for CPUs takes half the time without optimization; the graphs are the same, values differ by rounding.
# tests/trainer/devices/test_xla.py also compiles with it.
os.environ["XLA_FLAGS"] = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_use_fusion_emitters=false "
    "--xla_cpu_enable_fast_math=false"  # torch_xla adds it when it is imported, unless it is here
)
# Inductor otherwise tries the vector instructions that the processor names, each in a Python that imports torch.
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"
# Importing it otherwise starts a process that compiles, and that imports torch for it, even where all is compiled.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
interpret_kernels()
# What a shell starts in the background ignores Ctrl-C, and so does everything that it starts in turn.
signal.signal(signal.SIGINT, signal.default_int_handler)
ROOT = Path(__file__).parent.parent
#: The name of the tests' file systems in the list of mounts, before the id of the testing process.
DISK = "test-disk"

Stage = Callable[..., subprocess.CompletedProcess[str]]


@dataclass(frozen=True)
class Disk:
    """A file system of its own."""

    path: Path

    def resize(self, kib: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={kib}k", self.path], check=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules with the most slow tests run first, so that none of them is the last one that all others wait for."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


@pytest.fixture(scope="session", autouse=True)
def scratch() -> Iterator[None]:
    """Temporary files that a killed process leaves behind are removed at the end."""
    unmount_leftovers()
    with (
        tempfile.TemporaryDirectory(prefix="tests-", ignore_cleanup_errors=True) as name,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TMPDIR", name)
        start_fork_server()  # before a test changes variables that it would keep
        yield
        stop_fork_servers()


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """What a library sets in a test (torch's compiler does) is removed after it: else later commands are not forked."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def unmount_leftovers() -> None:
    """Killed tests leave their file systems, and pytest, which removes old folders, fails at those."""
    for partition in psutil.disk_partitions(all=True):
        device, _, pid = partition.device.partition("-of-")
        if device == DISK and not psutil.pid_exists(int(pid)):
            subprocess.run(["umount", "-l", partition.mountpoint], check=False)  # another worker may be faster


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """A tmpfs of 64 MiB, to be made smaller."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", f"{DISK}-of-{os.getpid()}", str(path)]
    mounted = subprocess.run(mount, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.decode().strip()}")
    yield Disk(path)
    subprocess.run(["umount", "-l", path], check=True)


@pytest.fixture(scope="session")
def native_library() -> Path:
    """The device of the stand-in for native torch-neuronx, compiled once for all test runs with this torch."""
    if shutil.which("g++") is None:
        pytest.skip("g++, which compiles the stand-in for native torch-neuronx, is not installed")
    from tests.standins.neuron_native.machine import build

    return build(ROOT / "build" / "neuron-native")


#: The variables that torch_xla sets when it is imported.
SET_BY_TORCH_XLA = {"TF_CPP_MIN_LOG_LEVEL": "1", "GRPC_VERBOSITY": "ERROR"}


@pytest.fixture
def torch_xla(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Commands are forked from a server that has imported torch_xla, which takes 5 s."""
    require_torch_xla()
    for name, value in SET_BY_TORCH_XLA.items():
        monkeypatch.setenv(name, value)
    with fork_server("torch_xla"):
        yield


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of other tools' files and real text next to the checkout, or BERT_SHARED_DIR."""
    path = Path(os.environ.get("BERT_SHARED_DIR", ROOT.parent / "shared"))
    if not path.is_dir():
        pytest.skip(f"the folder of shared data {path} is not here; BERT_SHARED_DIR may name another")
    return path


@pytest.fixture(scope="session")
def stage() -> Stage:
    """Runs `python -m stages.NAME arguments…`, with environment variables as keywords."""

    def run(name: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return command("-m", f"stages.{name}", *map(str, arguments), env=environment, timeout=120)

    return run
