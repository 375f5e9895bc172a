"""The CPU."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from common.process import available_cores
from trainer.data.bert_batch import filled_up
from trainer.devices.base import Device, DeviceOptions
from trainer.models.operations import AttentionMask, Operations
from trainer.parallel.mesh import Mesh

#: malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


class CpuOperations(Operations):
    """Cheap dropout: torch draws a number per element, on one thread (a quarter of a bf16 step); this one per four.
    Attention in bf16 by matrix products, which are faster than torch's own kernel."""

    def dropout(self, x: Tensor, p: float) -> Tensor:
        dropped: Tensor = _Dropout.apply(x, p)  # type: ignore[no-untyped-call]
        return dropped

    def attention_mask(
        self, sequence_ids: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None = None
    ) -> AttentionMask:
        """For packed rows, (length, is a sequence and not padding) of each run; the usual mask in a compiled graph."""
        if cu_seqlens is None or torch.compiler.is_compiling():
            return super().attention_mask(sequence_ids, cu_seqlens)
        lengths = cu_seqlens.diff()
        is_run = lengths > 0
        is_sequence = sequence_ids.flatten()[cu_seqlens[:-1][is_run]] > 0
        return list(zip(lengths[is_run].tolist(), is_sequence.tolist(), strict=True))

    def attention(self, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, dropout_p: float) -> Tensor:
        if isinstance(mask, list):
            return self._attention_by_sequence(query, key, value, mask, dropout_p)
        if dropout_p == 0 and query.dtype != torch.bfloat16:
            # In bf16 its backward pass takes three times as long as products.
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.attention_by_products(query, key, value, mask, dropout_p)

    def _attention_by_sequence(
        self, query: Tensor, key: Tensor, value: Tensor, runs: list[tuple[int, bool]], dropout_p: float
    ) -> Tensor:
        """One sequence at a time, padded by `filled_up`: no scores between sequences are computed, and one sequence's
        fit the caches."""
        B, A, S, D = query.shape
        lengths = [length for length, _ in runs]

        def parts(x: Tensor) -> list[Tensor]:
            split = x.transpose(1, 2).reshape(B * S, A, D).split(lengths)
            # Contiguous: torch's bf16 matrix products take several times as long on strided operands.
            return [
                F.pad(part.transpose(0, 1), (0, 0, 0, filled_up(len(part)) - len(part))).contiguous() for part in split
            ]

        outs = []
        for q, k, v, (length, is_sequence) in zip(parts(query * D**-0.5), parts(key), parts(value), runs, strict=True):
            if is_sequence:
                scores = q @ k.transpose(1, 2)
                scores[:, :, length:] = torch.finfo(scores.dtype).min
                weights = torch.softmax(scores, dim=-1, dtype=scores.dtype)
                out = (self.dropout(weights, dropout_p) if dropout_p else weights) @ v
            else:
                out = torch.zeros_like(v)
            outs.append(out[:, :length].transpose(0, 1))
        return torch.cat(outs).view(B, S, A, D).transpose(1, 2)


class _Dropout(torch.autograd.Function):
    """Dropout from 16 random bits per element: p is rounded to a multiple of 2⁻¹⁶, and the scale follows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        drop = round(p * 2**16)
        words = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
        keep = (words.view(torch.int16)[: x.numel()] >= drop - 2**15).view(x.shape)
        ctx.save_for_backward(keep)
        ctx.scale = 2**16 / (2**16 - drop)
        return (x * keep).mul_(ctx.scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (keep,) = ctx.saved_tensors
        return (gradient * keep).mul_(ctx.scale), None


class CpuDevice(Device):
    operations: Operations = CpuOperations()
    torch_device = torch.device("cpu")
    backend = "gloo"
    outlives_collectives = True

    def __init__(self, local_world_size: int = 1, threads: int | None = None) -> None:
        """Divides the cores of this machine among its `local_world_size` workers, at most `threads` each, unless
        OMP_NUM_THREADS is set."""
        wanted = os.environ.get("OMP_NUM_THREADS")
        # torchrun sets it to 1 for every worker when the user did not set it.
        is_torchruns = wanted == "1" and "TORCHELASTIC_RUN_ID" in os.environ
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
        found = sorted({"avx512_bf16", "amx_bf16"} & cpu_flags())
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


def cpu_flags() -> set[str]:
    """The CPU features that Linux reports for the first core; empty on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return set()
    return next((set(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), set())
