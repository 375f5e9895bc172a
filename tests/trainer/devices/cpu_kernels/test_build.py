"""How the CPU's kernels are compiled, kept, and done without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.support import ROOT
from trainer.devices import cpu_kernels
from trainer.devices.cpu_kernels import build
from trainer.devices.cpu_operations import CpuOperations
from trainer.models.operations import Operations

needs_compiler = pytest.mark.skipif(cpu_kernels.library() is None, reason="needs a C compiler")
#: Says which file was loaded, or None.
COMMAND = "import torch; from trainer.devices.cpu_kernels import library; print(library() and library().path)"


def loaded(cache: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "XDG_CACHE_HOME": str(cache), **environment},
    )  # fmt: skip


@needs_compiler
def test_it_is_compiled_once_even_by_two_processes_at_once(tmp_path: Path) -> None:
    (first, said), (second, also) = (process.communicate() for process in [loaded(tmp_path), loaded(tmp_path)])
    assert first == second, said + also
    (file,) = (tmp_path / "bert-pretraining").iterdir()
    assert first.strip() == str(file)
    made = file.stat().st_mtime_ns
    again, said = loaded(tmp_path).communicate()
    assert again == first, said
    assert file.stat().st_mtime_ns == made


@pytest.mark.parametrize("case", ["no compiler", "one that fails", "no place for it", "damaged"])
def test_torchs_operations_are_used_where_it_cannot_be_had(tmp_path: Path, case: str) -> None:
    """One line says why; nothing else fails, and nothing is left."""
    environment = {}
    if case == "no compiler":
        environment, why = {"CC": "there-is-none"}, "there is no C compiler; install gcc, or set CC"
    elif case == "one that fails":
        compiler = tmp_path / "cc"
        compiler.write_text("#!/bin/sh\necho 'kernels.c: too new for me' >&2\nexit 3\n")
        compiler.chmod(0o700)
        environment, why = {"CC": str(compiler)}, "too new for me"
    elif case == "no place for it":
        (tmp_path / "cache").write_text("a file")
        why = "Not a directory"
    else:
        if cpu_kernels.library() is None:
            pytest.skip("needs a C compiler")
        loaded(tmp_path / "cache").communicate()
        (file,) = (tmp_path / "cache" / "bert-pretraining").iterdir()
        file.write_bytes(b"no library")
        why = "file too short"
    out, said = loaded(tmp_path / "cache", **environment).communicate()
    assert out == "None\n"
    (line,) = [line for line in said.splitlines() if "CPU kernels" in line]
    assert why in line
    if case == "one that fails":
        assert list((tmp_path / "cache" / "bert-pretraining").iterdir()) == []


@needs_compiler
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_there_is_one_openmp_runtime() -> None:
    """A second one's threads would compete with torch's for the cores."""
    code = f"{COMMAND}; from trainer.devices.cpu_kernels.build import _openmp_runtime as f; torch.ones(9**7).sum(); f()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith(".so")


def test_two_openmp_runtimes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    maps = "7f-80 r-xp 0 0:0 1 /opt/torch/lib/libgomp.so.1\n90-91 r-xp 0 0:0 2 /opt/with space/libiomp5.so\n"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: maps)
    with pytest.raises(OSError, match="torch has 2 OpenMP runtimes loaded, and needs one"):
        build._openmp_runtime()


def test_without_it_the_operations_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "library", lambda: None)
    ids, x = torch.ones(2, 5, dtype=torch.int64), torch.randn(2, 5)
    assert torch.equal(CpuOperations().attention_mask(ids, None), Operations().attention_mask(ids, None))
    torch.manual_seed(1)
    ours = CpuOperations().dropout(x, 0.5)
    torch.manual_seed(1)
    assert torch.equal(ours, Operations().dropout(x, 0.5))
