"""How the CPU's kernels are compiled, kept, and done without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from platform import libc_ver

import pytest
import torch

from tests.helpers.support import ROOT
from trainer.devices import cpu_kernels
from trainer.devices.cpu import CpuDevice
from trainer.devices.cpu_kernels import build
from trainer.devices.cpu_operations import CpuOperations
from trainer.models.operations import Operations
from trainer.parallel.mesh import Mesh

needs_compiler = pytest.mark.skipif(cpu_kernels.library() is None, reason="needs a C compiler")
#: Says which file was loaded, or None.
COMMAND = "import torch; from trainer.devices.cpu_kernels import library; print(library() and library().path)"


def loaded(cache: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "XDG_CACHE_HOME": str(cache), **environment},
    )  # fmt: skip


@pytest.mark.slow
@needs_compiler
def test_two_processes_that_compile_at_once_share_what_later_ones_load(tmp_path: Path) -> None:
    results = [process.communicate() for process in [loaded(tmp_path), loaded(tmp_path)]]
    (file,) = (tmp_path / "bert-pretraining").iterdir()
    for said in results:
        assert "CPU kernels" not in said[1]
    made = file.stat().st_mtime_ns
    again, said = loaded(tmp_path).communicate()
    assert again.strip() == str(file), said
    assert file.stat().st_mtime_ns == made


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("case", ["damaged", "no place", "a compiler with options"])
def test_it_is_compiled_whatever_is_there(tmp_path: Path, case: str) -> None:
    """A damaged file is replaced; without a cache directory the process has its own, which does not outlive it."""
    environment, folder = {"TMPDIR": str(tmp_path)}, tmp_path / "cache" / "bert-pretraining"
    if case == "damaged":
        loaded(tmp_path / "cache").communicate()
        (file,) = folder.iterdir()
        file.write_bytes(b"no library")
    elif case == "no place":
        (tmp_path / "cache").write_text("a file")
    else:
        environment["CC"] = "cc -g0"
    out, said = loaded(tmp_path / "cache", **environment).communicate()
    assert "CPU kernels" not in said
    assert Path(out.strip()).suffix == ".so", said
    assert sorted(tmp_path.iterdir()) == [tmp_path / "cache"]


@pytest.mark.parametrize("case", ["no compiler", "no command", "one that fails"])
def test_torchs_operations_are_used_where_it_cannot_be_had(tmp_path: Path, case: str) -> None:
    """One line says why; nothing else fails, and nothing is left."""
    if sys.platform != "linux":
        pytest.skip("reads /proc")
    if case == "no compiler":
        environment, why = {"CC": "there-is-none"}, "there is no C compiler; install gcc, or set CC"
    elif case == "no command":
        environment, why = {"CC": 'gcc "'}, "CC is 'gcc \"' (No closing quotation); set it to a C compiler"
    else:
        compiler = tmp_path / "cc"
        compiler.write_text("#!/bin/sh\necho 'kernels.c: too new for me' >&2\nexit 3\n")
        compiler.chmod(0o700)
        environment, why = {"CC": str(compiler)}, "too new for me"
    out, said = loaded(tmp_path / "cache", **environment).communicate()
    assert out == "None\n"
    (line,) = [line for line in said.splitlines() if "CPU kernels" in line]
    assert why in line
    assert list(tmp_path.glob("cache/*/*")) == []


@needs_compiler
def test_workers_have_kernels_all_or_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """They would draw other dropout: ranks that share a model would drift apart."""
    monkeypatch.setattr(build, "_forbidden", False)
    CpuDevice().start(Mesh())
    assert cpu_kernels.library() is not None
    monkeypatch.setattr(Mesh, "sum_on_host", lambda mesh, values: [sum(values) + 1])
    device = CpuDevice()
    device.start(Mesh())
    assert cpu_kernels.library() is None
    assert "another worker has none" in capsys.readouterr().err
    assert device.describe().endswith("torch's kernels")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or libc_ver()[0] != "glibc", reason="reads /proc, of glibc's heap")
def test_memory_comes_in_huge_pages_unless_addresses_are_limited() -> None:
    """Where the kernel has them; VmFlags of the heap say `hg`."""
    code = (
        "import resource, sys; from trainer.devices.cpu import _takes_huge_pages, keep_freed_memory\n"
        "if sys.argv[1:]: resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))\n"
        "keep_freed_memory(); maps = open('/proc/self/smaps').read()\n"
        "print(_takes_huge_pages(), ' hg ' in f' {maps} ')"
    )
    found = [
        subprocess.run(
            [sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        for words in ([], ["limited"])
    ]
    assert found[0] in ("True True\n", "False False\n")
    assert found[1] == "False False\n"


@needs_compiler
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_there_is_one_openmp_runtime() -> None:
    """A second one's threads would compete with torch's for the cores."""
    code = f"{COMMAND}; from trainer.devices.cpu_kernels.build import _openmp_runtime as f; torch.ones(9**7).sum(); f()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith(".so")


def test_the_openmp_runtime_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another library may have brought its own; which of two others is torch's cannot be told."""
    packages = Path(torch.__file__).resolve().parents[1]
    others = ["/opt/with space/libiomp5.so", "/opt/lib/libgomp-a1b2.so.1"]
    for torchs in (f"{packages}/torch/lib/libgomp.so.1", f"{packages}/torch.libs/libgomp-c3d4.so.1"):
        maps = "".join(f"7f-80 r-xp 0 0:0 1 {path}\n" for path in (*others, torchs))
        monkeypatch.setattr(Path, "read_text", lambda *_, maps=maps, **__: maps)
        assert build._openmp_runtime() == torchs
    maps = "".join(f"7f-80 r-xp 0 0:0 1 {path}\n" for path in others)
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
