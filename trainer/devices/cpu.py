"""The CPU."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import torch

from common.process import THREADS_VARIABLE, available_cores
from trainer.devices import processor
from trainer.devices.base import Device, DeviceOptions
from trainer.devices.cpu_kernels import forbid, kind, library
from trainer.devices.cpu_operations import CpuOperations
from trainer.models.operations import Operations
from trainer.parallel.mesh import Mesh

#: malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
#: sys/mman.h; and bytes of a page.
_MADV_HUGEPAGE, _HUGE_PAGE = 14, 2 << 20


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
        """All workers have kernels or none; else they would draw other dropout and round in other places."""
        keep_freed_memory()
        if not isinstance(self.operations, CpuOperations):
            return
        mesh.patiently(library if mesh.local_rank == 0 else lambda: None)  # the others load what this one has compiled
        if mesh.sum_on_host([library() is None])[0] and library() is not None:
            forbid("another worker has none")

    def describe(self) -> str:
        threads, capability = torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()
        kernels = kind() if isinstance(self.operations, CpuOperations) else "torch's kernels"
        return f"cpu, {threads} threads, {capability}, {kernels}"

    def automatic_precision(self) -> tuple[str, str]:
        """autocast where bf16 products are faster than fp32 ones. With Intel's avx512_bf16 without AMX they take twice
        as long; with AMD's, half."""
        found = sorted({"avx512_bf16", "amx_bf16"} & processor.flags())
        if found == ["avx512_bf16"] and processor.info().get("vendor_id") == "GenuineIntel":
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
    """Have glibc keep freed memory, and take it from the kernel in pages of 2 MB. By default large blocks are returned,
    and every step faults them in again, zeroed page by page: a tenth of a step (docs/decisions.md). Does nothing
    without glibc; takes small pages where address space is limited or counted."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return
    libc.mallopt(_M_MMAP_MAX, 0)
    libc.mallopt(_M_TRIM_THRESHOLD, -1)
    if not _takes_huge_pages():
        return
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes, libc.madvise.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    # The heap grows once, by addresses only: what is allocated later lies there, and is taken as it is written.
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    if block := libc.malloc(size):
        start = -(-block // _HUGE_PAGE) * _HUGE_PAGE
        libc.madvise(start, (block + size - start) // _HUGE_PAGE * _HUGE_PAGE, _MADV_HUGEPAGE)
        libc.free(block)


def _takes_huge_pages() -> bool:
    """Whether the kernel has pages of this size, and addresses that are not written cost nothing."""

    def read(path: str) -> str:
        try:
            return Path(path).read_text(encoding="utf-8").strip()
        except OSError:
            return ""

    limits = [resource.getrlimit(limit)[0] for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    is_filled = "MALLOC_PERTURB_" in os.environ or "perturb" in os.environ.get("GLIBC_TUNABLES", "")
    return (
        read("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size") == str(_HUGE_PAGE)
        and read("/proc/sys/vm/overcommit_memory") in ("0", "1")
        and set(limits) == {resource.RLIM_INFINITY}
        and not is_filled
    )


def matrix_flops_per_s(size: int, times: int, dtype: torch.dtype) -> float:
    """The best rate out of `times` products of two (size, size) matrices, with the current number of threads."""
    a, b = torch.rand(2, size, size).to(dtype)
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        torch.mm(a, b)
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / min(seconds)
