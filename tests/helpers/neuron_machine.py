"""A stand-in for a Trainium machine: `neuron-ls`, `neuron_parallel_compile` and the package torch-neuronx.

Its cores are XLA's CPU. All of our code runs as it would there: the device, its environment, the trial, the cache, and
with several workers torch_xla's own rendezvous and `xm.all_reduce`, whose last step goes through gloo.
The stand-ins do what AWS's documentation says of the real programs: graphs and compiled modules are in the cache named
by NEURON_CC_FLAGS (`--cache_dir`), else by NEURON_COMPILE_CACHE_URL, else by default, each program reading its own
environment; a graph is waited for while its lock file exists.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

#: Where the stand-in's programs look, below its folder, if no cache is named.
DEFAULT_CACHE = "default-cache"

_CACHE = """
import os, pathlib, re, sys

def cache():
    named = re.findall(r"--cache_dir[= ](\\S+)", os.environ.get("NEURON_CC_FLAGS", ""))
    return pathlib.Path(named[-1] if named else os.environ.get("NEURON_COMPILE_CACHE_URL", {default!r}))

def wait_for_locks():
    for lock in cache().rglob("*.lock"):
        sys.exit(f"Another process must be compiling {{lock}}: the real one would wait for ever")
"""

_PACKAGE = """
import atexit
assert "torch_xla" in sys.modules, "imported before torch_xla"
assert "--model-type=transformer" in os.environ["NEURON_CC_FLAGS"], os.environ["NEURON_CC_FLAGS"]
wait_for_locks()

def extract():
    from torch_xla.debug import metrics
    for number in range(metrics.counter_value("UncachedCompile") or 0):
        module = cache() / "neuronxcc-2.0" / f"MODULE_{number}+abc"
        module.mkdir(parents=True, exist_ok=True)
        (module / "model.hlo_module.pb.gz").write_text("graph")
        (module / "compile_flags.json").write_text(os.environ["NEURON_CC_FLAGS"])

if os.environ.get("NEURON_EXTRACT_GRAPHS_ONLY") == "1":
    atexit.register(extract)
if int(os.environ.get("WORLD_SIZE", "1")) > 1:
    connect_cores()
"""

_CORES = """
def connect_cores():
    # XLA's CPU knows one device a process: this lets torch_xla see those of all workers, as libneuronxla does, and
    # carries what it would all-reduce.
    import torch, torch_xla, torch.distributed as dist
    rank, size, groups_of = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), {}
    XLA = torch_xla._XLAC
    XLA._xla_get_all_devices = lambda: [f"CPU:{number}" for number in range(size)]
    XLA._xla_get_default_device_ordinal = lambda: rank

    @torch.no_grad()
    def all_reduce(kind, tensors, scale, groups, pin_layout):
        key = str(groups)
        if key not in groups_of:
            groups_of[key] = dist.new_subgroups_by_enumeration(groups, backend="gloo")[0]
        if rank == 0 and "ALL_REDUCES" in os.environ:
            with open(os.environ["ALL_REDUCES"], "a") as log:
                print(*(tensor.numel() for tensor in tensors), file=log)
        operation = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[kind]
        for tensor in tensors:
            host = tensor.detach().cpu()
            dist.all_reduce(host, operation, group=groups_of[key])
            tensor.copy_(host * scale)

    XLA._xla_all_reduce_inplace = all_reduce
"""

_COMPILER = """
import subprocess
wait_for_locks()
done = subprocess.run(sys.argv[1:], env={**os.environ, "NEURON_EXTRACT_GRAPHS_ONLY": "1"})
if done.returncode:
    sys.exit(done.returncode)
for graph in cache().rglob("model.hlo_module.pb.gz"):
    if os.environ.get("UNCOMPILED") != graph.parent.name:
        (graph.parent / "model.neff").write_text("compiled")
"""


def install_package(site: Path, name: str, version: str, about: str, module: str = "") -> None:
    """Put an installed package into `site`: its metadata and a module."""
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\n{about}\n")
    (site / f"{name}.py").write_text(module)


def install_xla_lane(site: Path, module: str = "") -> None:
    """Put the packages of the XLA lane into `site`, except torch and torch-xla, which are real. `module`: the code of
    torch_neuronx."""
    install_package(site, "torch_neuronx", "2.9.0.2.13.26312", "Stand-in.", module)
    install_package(site, "neuronx_cc", "2.24.8799.0", "Stand-in.")
    install_package(site, "libneuronxla", "2.2.16408.0", "Stand-in.")


def install_program(folder: Path, name: str, text: str) -> None:
    """Put an executable into `folder`/bin."""
    program = folder / "bin" / name
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(text)
    program.chmod(0o755)


def hardware(folder: Path, *, cores: Sequence[int]) -> dict[str, str]:
    """The environment of a machine whose `neuron-ls` lists devices with these numbers of cores; its packages come from
    `folder`/site."""
    devices = [{"neuron_device": index, "nc_count": count} for index, count in enumerate(cores)]
    install_program(folder, "neuron-ls", f"#!/bin/sh\n[ \"$1\" = -j ] && echo '{json.dumps(devices)}'\n")
    path = [str(folder / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": ":".join(path), "PJRT_DEVICE": "CPU"}


def machine(folder: Path, *, cores: Sequence[int] = (2,)) -> dict[str, str]:
    """The environment of a machine that also has the packages."""
    cache = _CACHE.format(default=str(folder / DEFAULT_CACHE))
    install_xla_lane(folder / "site", cache + _CORES + _PACKAGE)
    install_program(folder, "neuron_parallel_compile", f"#!/usr/bin/env python3\n{cache}{_COMPILER}")
    return hardware(folder, cores=cores)
