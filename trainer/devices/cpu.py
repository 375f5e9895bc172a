"""The CPU."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import torch

from common.process import THREADS_VARIABLE, available_cores
from trainer.devices.base import Device, DeviceOptions
from trainer.devices.cpu_operations import CpuOperations
from trainer.models.operations import Operations
from trainer.parallel.mesh import Mesh

#: malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


class CpuDevice(Device):
    operations: Operations = CpuOperations()
    torch_device = torch.device("cpu")
    backend = "gloo"
    outlives_collectives = True

    def __init__(self, local_world_size: int = 1, threads: int | None = None) -> None:
        """Divides the cores of this machine among its `local_world_size` workers, at most `threads` each, unless
        OMP_NUM_THREADS is set. A 1 counts as torchrun's, which it sets for users who did not, unless our torchrun
        says that it is the user's."""
        wanted = os.environ.get("OMP_NUM_THREADS")
        is_torchruns = wanted == "1" and "TORCHELASTIC_RUN_ID" in os.environ and THREADS_VARIABLE not in os.environ
        if wanted is None or is_torchruns:
            cores = available_cores() if is_torchruns else torch.get_num_threads()
            share = max(1, cores // local_world_size)
            torch.set_num_threads(min(share, threads or share))

    @classmethod
    def of(cls, mesh: Mesh, options: DeviceOptions) -> Self:
        return cls(mesh.local_world_size, options.threads)

    def start(self, mesh: Mesh) -> None:
        keep_freed_memory()

    def describe(self) -> str:
        return f"cpu, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"

    def automatic_precision(self) -> tuple[str, str]:
        """autocast where bf16 products are faster than fp32 ones. With Intel's avx512_bf16 without AMX they take twice
        as long; with AMD's, half."""
        found = sorted({"avx512_bf16", "amx_bf16"} & cpu_flags())
        if found == ["avx512_bf16"] and cpu_info().get("vendor_id") == "GenuineIntel":
            return "fp32", "on Intel's CPUs avx512_bf16 without AMX is slower"
        if found:
            return "autocast", f"this CPU has bf16 instructions ({', '.join(found)})"
        return "fp32", "this CPU has no bf16 instructions"

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    @contextlib.contextmanager
    def random_region(self, seed: int) -> Iterator[None]:
        state = torch.default_generator.get_state()
        torch.default_generator.manual_seed(seed)
        yield
        torch.default_generator.set_state(state)

    def peak_flops_per_s(self, precision: str) -> float | None:
        """Measured with matrix multiplications, since it is not published. Takes 20 ms to 1 s."""
        dtype = {"fp64": torch.float64, "fp32": torch.float32}.get(precision, torch.bfloat16)
        rate = matrix_flops_per_s(256, 2, dtype)
        size, times = (512 if torch.get_num_threads() <= 4 else 1024), 4
        # A CPU without bf16 instructions takes seconds for each product of this size.
        is_slow = times * 2 * size**3 / rate > 1.0
        return rate if is_slow else matrix_flops_per_s(size, times, dtype)


def keep_freed_memory() -> None:
    """Have glibc keep freed memory. By default it returns large blocks to the kernel, and every step faults them in
    again, zeroed page by page: a tenth of a step (docs/decisions.md). Does nothing without glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)


def matrix_flops_per_s(size: int, times: int, dtype: torch.dtype) -> float:
    """The best rate out of `times` products of two (size, size) matrices, with the current number of threads."""
    a, b = torch.rand(2, size, size).to(dtype)
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        torch.mm(a, b)
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / min(seconds)


def cpu_info() -> dict[str, str]:
    """What Linux reports of the first core, by field; empty on other systems."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    except FileNotFoundError:
        return {}
    fields = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in fields}


def cpu_flags() -> set[str]:
    """The features of the first core; empty where they are not known."""
    return set(cpu_info().get("flags", "").split())
