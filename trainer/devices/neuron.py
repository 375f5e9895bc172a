"""AWS Trainium through torch-neuronx: the XLA device with collectives in the graph, and what the runtime must be told
before it is loaded.

No machine here has one: what is around it is tested, with stand-ins named as such; the rest follows AWS's tutorials.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import torch

from common.errors import UserError
from common.process import node_rank
from trainer.devices.base import DeviceOptions
from trainer.devices.neuron_cache import CC_FLAGS, merge_flags, node_cache, use_cache
from trainer.devices.xla import XlaDevice
from trainer.parallel.mesh import Group, Mesh

#: Where the packages come from: those of these names in the public registry install and do nothing.
REPOSITORY = "pip.repos.neuron.amazonaws.com"
PACKAGES = ("torch-neuronx", "neuronx-cc", "libneuronxla")
#: Logical cores of an instance → worker counts its runtime supports (MLP tutorial, known issues; developer guide).
_WORKERS = {2: (1, 2), 32: (1, 2, 8, 32), 64: (1, 64)}
#: Cores of a trn2.48xlarge before they are joined in pairs, its default.
_TRN2_PHYSICAL_CORES = 128
#: Spoken of in older instructions; what takes their place.
_DEPRECATED = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16")
#: What `--precision auto` means here.
_AUTOMATIC = "autocast"
#: Dense bf16 peak of one NeuronCore-v2, FLOP/s: AWS gives 190 TFLOP/s for a Trainium chip of two.
_BF16_PEAK = 95e12


def environment(options: DeviceOptions, *, nodes: int, cache: Path | None = None) -> dict[str, str]:
    """Variables that must be set before `torch_xla` is imported; `cache`: this machine's directory for graphs."""
    flags = ["--model-type=transformer", "--retry_failed_compilation"]
    precision = _AUTOMATIC if options.precision == "auto" else options.precision
    if precision == "autocast":
        flags.append("--auto-cast=none")
    if cache is not None:
        flags.append(f"--cache_dir={cache}")
    variables = {
        "NEURON_RT_STOCHASTIC_ROUNDING_EN": "1" if precision == "bf16-sr" else "0",
        "NEURON_RT_STOCHASTIC_ROUNDING_SEED": str(options.rounding_seed % 2**31),  # fits any 32-bit integer
        CC_FLAGS: " ".join(flags),
        "NEURON_RT_EXEC_TIMEOUT": "600",
    }
    if nodes > 1:
        variables |= {
            "FI_PROVIDER": "efa",
            "FI_EFA_USE_DEVICE_RDMA": "1",
            "FI_EFA_FORK_SAFE": "1",
            "BUCKET_CAP_MB": "512",
            "XLA_TRANSFER_SEED_ASYNC": "1",
        }
    return variables


def settle(wanted: Mapping[str, str], given: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """What of `wanted` is to be set beside the variables `given` by the user, which win; and a line for each. Compiler
    flags are merged, one by one.

    Raises `UserError` for variables that no longer do what they did.
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


def wrong_packages() -> list[str]:
    """Installed stand-ins of the public registry, which bear the names of the Neuron packages and hold nothing."""
    found = []
    for name in (*PACKAGES, "neuronx-distributed"):
        try:
            about = metadata.distribution(name).read_text("METADATA") or ""
        except metadata.PackageNotFoundError:
            continue
        if "WRONG PACKAGE" in about:
            found.append(f"{name} {metadata.version(name)}")
    return found


def require_packages() -> None:
    """Raise `UserError` unless torch-neuronx is there, and is the real one."""
    where = f"pip install --extra-index-url=https://{REPOSITORY} '.[neuron]' (docs/trainium.md)"
    if wrong := wrong_packages():
        raise UserError(f"{', '.join(wrong)} of the public registry hold nothing; uninstall them, then {where}")
    try:
        metadata.version("torch-neuronx")
    except metadata.PackageNotFoundError:
        raise UserError(f"device neuron needs torch-neuronx, which is not installed; {where}") from None


def cores() -> int:
    """Logical NeuronCores of this machine, as `neuron-ls` counts them. Raises `UserError`."""
    program = shutil.which("neuron-ls") or shutil.which("/opt/aws/neuron/bin/neuron-ls")
    if program is None:
        raise UserError("neuron-ls is not here: is this a Trainium instance with aws-neuronx-tools (docs/trainium.md)?")
    answer = subprocess.run([program, "-j"], capture_output=True, text=True, timeout=60, check=False)
    try:
        devices: list[dict[str, Any]] = json.loads(answer.stdout)
        total = sum(int(device["nc_count"]) for device in devices)
    except (ValueError, KeyError, TypeError):
        said = (answer.stderr or answer.stdout).strip().splitlines()
        raise UserError(f"neuron-ls -j: {said[-1] if said else 'no answer'}; check the Neuron driver") from None
    if total == _TRN2_PHYSICAL_CORES:
        total //= int(os.environ.get("NEURON_LOGICAL_NC_CONFIG", "2"))
    return total


def visible_cores(value: str) -> int:
    """How many cores `NEURON_RT_VISIBLE_CORES` names: `0-7`, `3`, `0,2,4-5`. Raises `UserError`."""
    count = 0
    for part in value.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        extent = int(match[2] or match[1]) - int(match[1]) + 1 if match else 0
        if extent < 1:
            raise UserError(f"NEURON_RT_VISIBLE_CORES={value} is no list of cores; write 0-7 or 0,2,4-5")
        count += extent
    return count


def check_workers(local_workers: int, total: int, visible: str | None) -> None:
    """Raise `UserError` unless the runtime supports so many workers on a machine of `total` logical cores."""
    usable = total if visible is None else min(total, visible_cores(visible))
    # An instance that is not in the table: whatever fits.
    allowed = [count for count in _WORKERS.get(total, range(1, total + 1)) if count <= usable]
    if local_workers not in allowed:
        seen = f"{total} NeuronCores" + ("" if visible is None else f", {usable} of them visible")
        raise UserError(
            f"{local_workers} workers on this machine of {seen}; its runtime supports "
            f"{', '.join(map(str, allowed))}; change nproc_per_node"
        )


def load_runtime() -> None:
    import torch_neuronx  # noqa: F401 (teaches torch_xla about NeuronCores)


class NeuronDevice(XlaDevice):
    """One NeuronCore a worker. Reductions are part of the graph."""

    backend = "xla"
    has_ddp = True

    def __init__(self, mesh: Mesh, options: DeviceOptions) -> None:
        """Sets the runtime's variables and loads it. Raises `UserError`."""
        require_packages()
        if mesh.local_rank == 0:
            check_workers(mesh.local_world_size, cores(), os.environ.get("NEURON_RT_VISIBLE_CORES"))
        cache = None if options.compile_cache is None else node_cache(Path(options.compile_cache), node_rank())
        wanted, self._settings = settle(environment(options, nodes=mesh.nodes, cache=cache), os.environ)
        os.environ.update(wanted)
        os.environ.setdefault("PJRT_DEVICE", "NEURON")
        if cache is not None and mesh.local_rank == 0:  # before any worker here compiles: they have not met yet
            self._cache_mark = use_cache(cache, functools.partial(print, flush=True))
        # How many operations a graph has, only neuronx-cc could say: XLA_FLAGS are of XLA's own compilers.
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
                f"torchrun started {mesh.world_size} workers, the Neuron runtime sees {world_size}: their gradients "
                f"would not meet; start all with one torchrun command, rank 0's machine first"
            )

    def describe(self) -> str:
        return f"neuron, torch-neuronx {metadata.version('torch-neuronx')}; {'; '.join(self._settings)}"

    def automatic_precision(self) -> tuple[str, str]:
        return _AUTOMATIC, "NeuronCores multiply in bf16"

    def round_stochastically(self, x: torch.Tensor) -> torch.Tensor:
        """As it is: the runtime rounds wherever fp32 becomes bf16 (`NEURON_RT_STOCHASTIC_ROUNDING_EN`)."""
        return x

    def all_reduce(self, tensors: list[torch.Tensor], group: Group, *, sums: bool = True) -> None:
        if group.size > 1:
            kind = self._xm.REDUCE_SUM if sums else self._xm.REDUCE_MAX
            self._xm.all_reduce(kind, tensors, groups=group.ranks, pin_layout=False)

    def peak_flops_per_s(self, precision: str) -> float | None:
        return _BF16_PEAK if precision != "fp32" else None
