"""The chain without what only Linux has: the calls are removed in every process, which is no substitute for a test on
another system. And with what a newer Python does differently."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests.helpers.chain import Chain
from tests.helpers.support import command

#: Run by each Python when it starts. psutil, which has its own ways on other systems, still sees /proc.
WITHOUT_LINUX = """
import builtins, ctypes, fcntl, io, os, pathlib

for name in dir(os):
    if name.startswith(("posix_f", "POSIX_FADV", "sched_", "memfd_", "MFD_", "O_DIRECT", "O_TMPFILE", "copy_file_range",
                        "pidfd_", "eventfd", "splice", "setns", "unshare")) and name != "O_DIRECTORY":
        delattr(os, name)

class Library(ctypes.CDLL):
    def __getattr__(self, name):
        if name in ("mallopt", "malloc_trim", "prctl", "renameat2", "sync_file_range", "fallocate", "memfd_create"):
            raise AttributeError(name)
        return super().__getattr__(name)

ctypes.CDLL = Library

def hidden(path):
    # Not /sys, which torch_xla reads when it is imported: a package for Linux only.
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
    files = ("/proc/self/maps", "/proc/cpuinfo", "/proc/meminfo")
    return isinstance(text, str) and (text in files or text.startswith("/proc/") and "/fd/" in text)

def guarded(function):
    def call(path, *args, **kwargs):
        if hidden(path):
            raise FileNotFoundError(2, "No such file or directory", path)
        return function(path, *args, **kwargs)
    return call

builtins.open, io.open = guarded(builtins.open), guarded(io.open)
pathlib.io.open = io.open

def ioctl(*args, **kwargs):
    raise OSError(25, "Inappropriate ioctl for device")

fcntl.ioctl = ioctl
"""


@pytest.fixture
def site(tmp_path: Path) -> str:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(WITHOUT_LINUX)
    return str(tmp_path / "site")


def test_the_calls_are_gone(site: str) -> None:
    program = "import os, ctypes; print(hasattr(os, 'posix_fadvise'), hasattr(ctypes.CDLL(None), 'mallopt'))"
    done = command("-c", program, env={"PYTHONPATH": site})
    assert done.stdout.split() == ["False", "False"], done.stderr


@pytest.mark.slow
def test_the_whole_chain_runs_with_two_workers(tmp_path: Path, site: str) -> None:
    chain = Chain(tmp_path)
    done = chain.run(
        "BertPhase2", "--Cluster-nproc-per-node", "2", "--Cluster-tensor-parallel-size", "2", PYTHONPATH=site
    )
    assert "BERT is pretrained." in done.stderr
    assert "Traceback" not in done.stderr
    for stage in ("shard_dataset-phase1", "pretrain-phase2", "merge_shards", "evaluate"):
        assert (chain.latest(stage) / "manifest.json").exists()


def test_luigis_workers_run_where_python_does_not_fork_by_itself(tmp_path: Path) -> None:
    """As Python 3.14 does on Linux."""
    (tmp_path / "site").mkdir()
    program = 'import multiprocessing\nmultiprocessing.set_start_method("forkserver")'
    (tmp_path / "site" / "sitecustomize.py").write_text(program)
    chain = Chain(tmp_path)
    chain.run("ShardDataset", "--phase", "1", "--workers", "2", PYTHONPATH=str(tmp_path / "site"))
    assert (chain.latest("shard_dataset-phase1") / "manifest.json").exists()


def test_a_large_file_is_written_whole(tmp_path: Path, site: str) -> None:
    """Large enough that write-back to the disk would be started early."""
    program = (
        "import sys; from pathlib import Path; from common.files import durable_file\n"
        "with durable_file(Path(sys.argv[1])) as file:\n"
        "    for piece in range(5): file.write(bytes([piece]) * (16 << 20))\n"
        "print(file.sha256)"
    )
    done = command("-c", program, str(tmp_path / "file"), env={"PYTHONPATH": site})
    assert done.returncode == 0, done.stderr
    wanted = hashlib.sha256(b"".join(bytes([piece]) * (16 << 20) for piece in range(5))).hexdigest()
    assert done.stdout.strip() == hashlib.sha256((tmp_path / "file").read_bytes()).hexdigest() == wanted


def test_the_doctor_says_what_it_can(site: str) -> None:
    done = command("-m", "trainer", "--doctor", env={"PYTHONPATH": site})
    assert "cores" in done.stdout, done.stderr
    assert "Traceback" not in done.stderr
