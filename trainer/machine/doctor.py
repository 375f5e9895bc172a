"""`python -m trainer --doctor`: report this machine's devices and versions, and the next command. `python -m
trainer.machine.doctor` prints the facts on devices as JSON, for `python -m pipeline doctor`."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from common.errors import UserError
from common.process import available_cores
from trainer.devices import processor
from trainer.devices.cpu_kernels import kind
from trainer.devices.neuron_lane import NATIVE, Installation, cores, lane_of, problems

_RUN = "luigi --module pipeline BertPhase2"


def examine(log: Callable[[str], None]) -> int:
    """Report what is installed; returns 1 if something must be fixed first, else 0."""
    log(f"python {platform.python_version()}, {platform.platform()}")
    for name in (
        *("torch", "torch-xla", "torch-neuronx", "neuronx-cc", "libneuronxla", "nki"),
        *("transformers", "luigi", "h5py"),
    ):
        log(f"  {name:14} {_version(name)}")
    log(f"cpu     {available_cores()} cores, {_cpu_kind()}; {_memory_gb():.0f} GB memory")
    log(f"disk    {shutil.disk_usage(Path.cwd()).free / 1e9:.0f} GB free here")
    gpus = _gpus()
    log(f"cuda    {', '.join(gpus) or 'no GPU that torch sees'}")
    commands = [_RUN]
    if gpus:
        commands.insert(0, f"{_RUN} --Cluster-device cuda --Cluster-nproc-per-node {len(gpus)}")
    missing = _examine_neuron(log, commands)
    for problem in missing:
        log(f"missing {problem}")
    log(f"next    {commands[0]}" if not missing else "next    fix what is missing, then run this again")
    return 1 if missing else 0


def facts() -> dict[str, Any]:
    """Devices, and what is installed for them; None: there is none, or it is not known."""
    installation = Installation.of_machine()
    found: dict[str, Any] = {"gpus": _gpus(), "versions": dict(installation.versions), "neuron_cores": None}
    try:
        found["neuron_cores"] = cores()
    except UserError as error:
        found["neuron_error"] = str(error)
    try:
        found["neuron_lane"], found["neuron_why"] = lane_of(installation)
    except UserError:  # which is also the first problem
        found["neuron_lane"] = None
    return {**found, "neuron_problems": problems(installation)}


def _gpus() -> list[str]:
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _examine_neuron(log: Callable[[str], None], commands: list[str]) -> list[str]:
    """What must be fixed for Trainium; nothing where there is neither a NeuronCore nor a package. On a machine with
    cores, their command is put first in `commands`."""
    installation, has_cores, config = Installation.of_machine(), True, "trn1"
    try:
        log(f"neuron  {cores()} NeuronCores")
    except UserError as error:
        log(f"neuron  {error}")
        has_cores = False
    if not has_cores and "torch-neuronx" not in installation.versions:
        return []
    with contextlib.suppress(UserError):
        lane, reason = lane_of(installation)
        log(f"lane    {lane}: {reason}")
        if lane == NATIVE:
            config = "trn3" if installation.instance.startswith("trn3") else "trn2"
    if has_cores:
        commands.insert(0, f"python -m pipeline init --for {config} run && cd run && {_RUN}")
    return problems(installation)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "-"


def _cpu_kind() -> str:
    known = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in processor.flags()]
    instructions = " ".join(known) or "no vector instructions known here"
    return f"{torch.backends.cpu.get_cpu_capability()}, {instructions}, {kind()}"


def _memory_gb() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9


if __name__ == "__main__":
    print(json.dumps(facts()))
