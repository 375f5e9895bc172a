"""The CPU."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from trainer.devices.base import Device


class CpuDevice(Device):
    torch_device = torch.device("cpu")
    backend = "gloo"

    def __init__(self, local_world_size: int = 1) -> None:
        """Shares the cores of this machine among its `local_world_size` workers, unless OMP_NUM_THREADS says more."""
        # torchrun sets OMP_NUM_THREADS=1 for every worker when the user did not set it.
        if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1":
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_world_size))

    def describe(self) -> str:
        return f"cpu, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"

    def automatic_precision(self) -> tuple[str, str]:
        if {"avx512_bf16", "amx_bf16"} & cpu_flags():
            return "autocast", "this CPU has bf16 instructions"
        return "fp32", "this CPU has no bf16 instructions"

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def peak_flops_per_s(self, precision: str) -> float | None:
        return None


def cpu_flags() -> set[str]:
    """The features Linux reports for this machine's first core; none elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except FileNotFoundError:
        return set()
    return next((set(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), set())
