"""That the kernels can be compiled for GPUs, which the interpreter does not show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton, which is for Linux")
#: Attention, for two sizes of heads, has four kernels, norm, GELU and cross-entropy two each.
KERNELS = 2 * 4 + 3 * 2


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["89", "90"], ids=["L4 and others", "H100"])
def test_all_kernels_are_compiled_and_fit_into_shared_memory(capability: str, tmp_path: Path) -> None:
    """Of the GPUs with tensor cores for bf16, those of compute capability 8.6, 8.9 and 12.0 have the least: 99 KiB
    (CUDA C++ Programming Guide, table of compute capabilities)."""
    words = [sys.executable, "-m", "tests.trainer.devices.kernels.compiling", capability]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    count, most = map(int, done.stdout.split())
    assert count == KERNELS
    assert most <= 99 * 1024 or capability != "89"
