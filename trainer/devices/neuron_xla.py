"""AWS Trainium through PyTorch/XLA: the XLA device with collectives in the graph, and the runtime's variables, which
must be set before it is loaded.

It has not run on a NeuronCore: what surrounds it is tested with stand-ins, the rest follows AWS's tutorials.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import torch

from common.errors import UserError
from common.process import node_rank
from trainer.devices.base import DeviceOptions
from trainer.devices.neuron_cache import CC_FLAGS, merge_flags, node_cache, use_cache
from trainer.devices.neuron_host import check_workers, raise_open_files
from trainer.devices.neuron_lane import XLA, Installation, cores, peak_of, require_at_most_fp32, require_lane
from trainer.devices.xla import XlaDevice, buckets
from trainer.parallel.mesh import Group, Mesh

#: Variables of older instructions that torch-neuronx no longer supports.
_DEPRECATED = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16")
#: The precision that `auto` selects.
_AUTOMATIC = "autocast"
#: Whether the runtime rounds stochastically wherever fp32 becomes bf16, and the precisions that are made for it.
_ROUNDING, _ROUNDED = "NEURON_RT_STOCHASTIC_ROUNDING_EN", ("bf16-sr", "autocast-sr")
#: Megabytes of gradients in one all-reduce: torch-neuronx's variable and default. Smaller buckets leave the compiler
#: more to overlap; between machines each all-reduce takes long to begin, and AWS suggests the larger one.
_BUCKET_MB, _BUCKET, _BUCKET_OF_SEVERAL_NODES = "ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB", "50", "512"
#: Ports at which the runtime's workers meet on rank 0's machine: above Linux's ephemeral ports, below the last port.
_FIRST_PORT, _PORTS = 61000, 4096
_INTERFACES = Path("/sys/class/net")


def environment(
    options: DeviceOptions, *, nodes: int, cache: Path | None = None, given: Mapping[str, str]
) -> dict[str, str]:  # fmt: skip
    """Variables that must be set before `torch_xla` is imported. `cache`: this machine's compile cache. `given`: the
    process's environment."""
    flags = ["--model-type=transformer", "--retry_failed_compilation"]
    precision = _AUTOMATIC if options.precision == "auto" else options.precision
    if precision.startswith("autocast"):
        flags.append("--auto-cast=none")
    if cache is not None:
        flags.append(f"--cache_dir={cache}")
    variables = {
        _ROUNDING: "1" if precision in _ROUNDED else "0",
        "NEURON_RT_STOCHASTIC_ROUNDING_SEED": str(options.rounding_seed % 2**31),  # fits a signed 32-bit integer
        CC_FLAGS: " ".join(flags),
        "NEURON_RT_EXEC_TIMEOUT": "600",
        # Queues steps while earlier ones run. Has no effect from SDK 2.31 on, which does so itself.
        "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "3",
        "NEURON_FUSE_SOFTMAX": "1",
        _BUCKET_MB: _BUCKET if nodes == 1 else _BUCKET_OF_SEVERAL_NODES,
    }
    if "MASTER_ADDR" in given and "MASTER_PORT" in given:
        variables["NEURON_RT_ROOT_COMM_ID"] = root_comm_id(given["MASTER_ADDR"], int(given["MASTER_PORT"]))
    if nodes > 1:
        # Not AWS's BUCKET_CAP_MB and XLA_TRANSFER_SEED_ASYNC: torch-xla 2.9 reads neither.
        variables |= {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1"}
    if "KUBERNETES_SERVICE_HOST" in given and (_INTERFACES / "eth0").exists():
        variables["CCOM_SOCKET_IFNAME"] = "eth0"  # that of a pod; a pod on the host's network may have another
    return variables


def root_comm_id(address: str, port: int) -> str:
    """Where the runtime's workers meet. torch_xla uses the same port for all jobs, so that two on one machine collide;
    this one differs whenever torchrun's `port` does, unless by a multiple of 4096."""
    host = f"[{address.strip('[]')}]" if address.count(":") > 1 else address
    return f"{host}:{_FIRST_PORT + port % _PORTS}"


def settle(wanted: Mapping[str, str], given: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The variables of `wanted` to set, and a log line for each. Variables `given` by the user win; compiler flags are
    merged flag by flag.

    Raises `UserError` for variables that torch-neuronx no longer supports.
    """
    for name in _DEPRECATED:
        if given.get(name, "0") not in ("", "0"):
            raise UserError(
                f"{name}={given[name]} is set, which torch-neuronx no longer supports; unset it, and choose "
                f"--precision autocast or autocast-sr, or bf16 weights with stochastic rounding, --precision bf16-sr"
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


def bucket_bytes(megabytes: str) -> int:
    """The size of a bucket of gradients, from torch-neuronx's variable, for which 0 means all in one. Raises
    `UserError`."""
    if not megabytes.isdecimal():
        raise UserError(f"{_BUCKET_MB}={megabytes} is not a whole number; write 50, or unset it")
    return (int(megabytes) or sys.maxsize >> 20) << 20


def load_runtime() -> None:
    import torch_neuronx  # noqa: F401 (registers NeuronCores with torch_xla)


class NeuronXlaDevice(XlaDevice):
    """One NeuronCore per worker. Reductions are part of the graph."""

    backend = "xla"
    #: torch_xla's own rendezvous: without it XLA's world is 1 in every worker, and `xm.all_reduce` does nothing.
    init_method = "xla://"
    #: Whether the user's own variable has the hardware round, without an option that says so. (In the self-test of a
    #: precision that is rounded the same device computes in fp32, too, in which nothing is rounded.)
    _rounds_regardless = False

    def __init__(self, mesh: Mesh, options: DeviceOptions) -> None:
        """Sets the runtime's environment variables and loads it. Raises `UserError`."""
        self._lane = require_lane(Installation.of_machine(), XLA)
        if mesh.local_rank == 0:
            check_workers(mesh.local_world_size, cores(), os.environ.get("NEURON_RT_VISIBLE_CORES"))
        cache = None if options.compile_cache is None else node_cache(Path(options.compile_cache), node_rank())
        self._rounds_regardless = os.environ.get(_ROUNDING) == "1" and options.precision not in _ROUNDED
        wanted, settings = settle(environment(options, nodes=mesh.nodes, cache=cache, given=os.environ), os.environ)
        os.environ.update(wanted)
        self._settings = [*settings, raise_open_files()]
        self._bucket_bytes = bucket_bytes(os.environ[_BUCKET_MB])
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

    def require_precision(self, name: str) -> None:
        require_at_most_fp32(name, XLA)
        if name in _ROUNDED and os.environ.get(_ROUNDING) != "1":
            raise UserError(
                f"precision {name} needs {_ROUNDING}=1, but it is {os.environ.get(_ROUNDING, 'unset')}; unset it if it "
                f"is yours, and name the precision on the command line (--precision {name})"
            )
        if name not in _ROUNDED and self._rounds_regardless:
            raise UserError(
                f"{_ROUNDING}=1, but precision {name} rounds to nearest; unset it, or give --precision "
                f"{' or '.join(_ROUNDED)}"
            )

    def resumes_exactly(self, precision: str) -> bool:
        """The state of the hardware's rounding cannot be saved."""
        return precision not in _ROUNDED

    def round_stochastically(self, x: torch.Tensor) -> torch.Tensor:
        """Returns `x`: the runtime rounds wherever fp32 becomes bf16 (`NEURON_RT_STOCHASTIC_ROUNDING_EN`)."""
        return x

    def all_reduce(self, tensors: list[torch.Tensor], group: Group, *, sums: bool = True) -> None:
        """In buckets, last tensor first, as the backward pass computes gradients: a single all-reduce would wait
        for all of them, and everything else for it."""
        if group.size == 1:
            return
        kind = self._xm.REDUCE_SUM if sums else self._xm.REDUCE_MAX
        backwards = tensors[::-1]
        for bucket in buckets(backwards, self._bucket_bytes):
            self._xm.all_reduce(kind, backwards[bucket], groups=group.ranks, pin_layout=False)

    def peak_flops_per_s(self, precision: str) -> float | None:
        return None if precision in ("fp32", "fp64") else peak_of(Installation.of_machine().instance)
