"""That the kernels can be compiled for GPUs, which the interpreter does not show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton, which is for Linux")
#: Attention, for two sizes of heads, has four kernels, norm, called in two ways, GELU and cross-entropy two each.
KERNELS = 2 * 4 + 2 * 2 + 2 * 2


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "kib"), [("89", 99), ("90", 227)], ids=["L4 and others", "H100"])
def test_all_kernels_are_compiled_and_fit_into_shared_memory(capability: str, kib: int, tmp_path: Path) -> None:
    """A block's, by the CUDA C++ Programming Guide's table of compute capabilities. Of the GPUs with tensor cores for
    bf16, those of 8.6, 8.9 and 12.0 have the least."""
    words = [sys.executable, "-m", "tests.trainer.devices.kernels.compiling", capability]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    count, most = map(int, done.stdout.split())
    assert count == KERNELS
    assert 0 < most <= kib * 1024
