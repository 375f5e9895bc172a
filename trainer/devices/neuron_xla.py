"""AWS Trainium through PyTorch/XLA: the XLA device with collectives in the graph, and the runtime's variables, which
must be set before it is loaded.

It has not run on a NeuronCore: what surrounds it is tested with stand-ins, the rest follows AWS's tutorials.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import torch

from common.errors import UserError
from common.process import node_rank
from trainer.devices.base import DeviceOptions
from trainer.devices.neuron_cache import CC_FLAGS, merge_flags, node_cache, use_cache
from trainer.devices.neuron_lane import XLA, Installation, cores, require_xla_lane
from trainer.devices.xla import XlaDevice
from trainer.parallel.mesh import Group, Mesh

#: Logical cores of an instance → worker counts that its runtime supports (MLP tutorial, known issues; developer guide).
_WORKERS = {2: (1, 2), 32: (1, 2, 8, 32), 64: (1, 64)}
#: Variables of older instructions that torch-neuronx no longer supports.
_DEPRECATED = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16")
#: The precision that `auto` selects.
_AUTOMATIC = "autocast"
#: Dense bf16 peak of one NeuronCore-v2, FLOP/s: AWS gives 190 TFLOP/s for a Trainium chip of two.
_BF16_PEAK = 95e12


def environment(options: DeviceOptions, *, nodes: int, cache: Path | None = None) -> dict[str, str]:
    """Variables that must be set before `torch_xla` is imported. `cache`: this machine's compile cache."""
    flags = ["--model-type=transformer", "--retry_failed_compilation"]
    precision = _AUTOMATIC if options.precision == "auto" else options.precision
    if precision == "autocast":
        flags.append("--auto-cast=none")
    if cache is not None:
        flags.append(f"--cache_dir={cache}")
    variables = {
        "NEURON_RT_STOCHASTIC_ROUNDING_EN": "1" if precision == "bf16-sr" else "0",
        "NEURON_RT_STOCHASTIC_ROUNDING_SEED": str(options.rounding_seed % 2**31),  # fits a signed 32-bit integer
        CC_FLAGS: " ".join(flags),
        "NEURON_RT_EXEC_TIMEOUT": "600",
    }
    if nodes > 1:
        # Not AWS's BUCKET_CAP_MB and XLA_TRANSFER_SEED_ASYNC: torch-xla 2.9 reads neither.
        variables |= {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1"}
    return variables


def settle(wanted: Mapping[str, str], given: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The variables of `wanted` to set, and a log line for each. Variables `given` by the user win; compiler flags are
    merged flag by flag.

    Raises `UserError` for variables that torch-neuronx no longer supports.
    """
    for name in _DEPRECATED:
        if given.get(name, "0") not in ("", "0"):
            raise UserError(
                f"{name}={given[name]} is set, which torch-neuronx no longer supports; unset it, and choose "
                f"--precision autocast, or bf16 weights with stochastic rounding, --precision bf16-sr"
            )
    chosen, lines = {}, []
    for name, value in wanted.items():
        if name not in given:
            chosen[name] = value
            lines.append(f"{name}={value}")
        elif name == CC_FLAGS:
            chosen[name], remarks = merge_flags(given[name], value)
            lines.append(f"{name}={chosen[name]}" + (f" ({', '.join(remarks)})" if remarks else ""))
        else:
            lines.append(f"{name}={given[name]} (yours; ours would be {value})")
    return chosen, lines


def visible_cores(value: str) -> int:
    """The number of cores in a `NEURON_RT_VISIBLE_CORES` such as `0-7`, `3` or `0,2,4-5`. Raises `UserError`."""
    count = 0
    for part in value.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        extent = int(match[2] or match[1]) - int(match[1]) + 1 if match else 0
        if extent < 1:
            raise UserError(f"NEURON_RT_VISIBLE_CORES={value} is not a list of cores; write 0-7 or 0,2,4-5")
        count += extent
    return count


def check_workers(local_workers: int, total: int, visible: str | None) -> None:
    """Raise `UserError` unless the runtime supports `local_workers` workers on a machine of `total` logical cores."""
    usable = total if visible is None else min(total, visible_cores(visible))
    # Instances that are not in the table: any number that fits.
    allowed = [count for count in _WORKERS.get(total, range(1, total + 1)) if count <= usable]
    if local_workers not in allowed:
        seen = f"{total} NeuronCores" + ("" if visible is None else f", {usable} of them visible")
        raise UserError(
            f"{local_workers} workers on this machine of {seen}; its runtime supports "
            f"{', '.join(map(str, allowed))}; change nproc_per_node"
        )


def load_runtime() -> None:
    import torch_neuronx  # noqa: F401 (registers NeuronCores with torch_xla)


class NeuronXlaDevice(XlaDevice):
    """One NeuronCore per worker. Reductions are part of the graph."""

    backend = "xla"
    has_ddp = True

    def __init__(self, mesh: Mesh, options: DeviceOptions) -> None:
        """Sets the runtime's environment variables and loads it. Raises `UserError`."""
        self._lane = require_xla_lane(Installation.of_machine())
        if mesh.local_rank == 0:
            check_workers(mesh.local_world_size, cores(), os.environ.get("NEURON_RT_VISIBLE_CORES"))
        cache = None if options.compile_cache is None else node_cache(Path(options.compile_cache), node_rank())
        wanted, self._settings = settle(environment(options, nodes=mesh.nodes, cache=cache), os.environ)
        os.environ.update(wanted)
        os.environ.setdefault("PJRT_DEVICE", "NEURON")
        if cache is not None and mesh.local_rank == 0:  # before any worker of this machine compiles
            self._cache_mark = use_cache(cache, functools.partial(print, flush=True))
        # Operations are counted from dumps of XLA's own compilers (XLA_FLAGS), which neuronx-cc does not write.
        super().__init__(dataclasses.replace(options, count_operations=False))
        load_runtime()
        import torch_xla.distributed.xla_backend  # noqa: F401 (registers the process group's backend)

    @classmethod
    def of(cls, mesh: Mesh, options: DeviceOptions) -> Self:
        return cls(mesh, options)

    @staticmethod
    def check_worlds(mesh: Mesh, world_size: int) -> None:
        if world_size != mesh.world_size:
            raise UserError(
                f"torchrun started {mesh.world_size} workers, the Neuron runtime sees {world_size}, so gradients would "
                f"not be summed over all of them; start all with one torchrun command, rank 0's machine first"
            )

    def describe(self) -> str:
        return f"{XLA}, since {self._lane}; {'; '.join(self._settings)}"

    def automatic_precision(self) -> tuple[str, str]:
        return _AUTOMATIC, "NeuronCores multiply in bf16"

    def round_stochastically(self, x: torch.Tensor) -> torch.Tensor:
        """Returns `x`: the runtime rounds wherever fp32 becomes bf16 (`NEURON_RT_STOCHASTIC_ROUNDING_EN`)."""
        return x

    def all_reduce(self, tensors: list[torch.Tensor], group: Group, *, sums: bool = True) -> None:
        if group.size > 1:
            kind = self._xm.REDUCE_SUM if sums else self._xm.REDUCE_MAX
            self._xm.all_reduce(kind, tensors, groups=group.ranks, pin_layout=False)

    def peak_flops_per_s(self, precision: str) -> float | None:
        return _BF16_PEAK if precision != "fp32" else None
