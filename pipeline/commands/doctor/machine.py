"""This machine: packages, devices, shared memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.process import available_cores
from pipeline.commands.doctor.finding import Finding, Level, Plan
from stages.view.text import size
from trainer.devices.neuron_host import check_workers
from trainer.devices.neuron_lane import XLA

_PROJECT = "bert-pretraining-pipeline"
_SHARED_MEMORY = Path("/dev/shm")
#: Bytes that processes of one machine share: NVIDIA's advice for containers with several GPUs (`--shm-size=1g`), and
#: the semaphores of Python's process pools.
_FOR_NCCL, _FOR_POOLS = 1 << 30, 1 << 20
#: Seconds for importing torch and asking the devices.
_TIMEOUT_S = 120


def packages(plan: Plan) -> Iterator[Finding]:
    """The versions that pyproject.toml asks for."""
    from packaging.requirements import Requirement

    wrong, seen = [], 0
    for line in _requirements():
        asked = Requirement(line)
        if asked.marker is not None and not asked.marker.evaluate({"extra": ""}):
            continue
        seen += 1
        try:
            version = metadata.version(asked.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{asked.name} is not installed (needed: {asked.specifier or 'any'})")
            continue
        if not asked.specifier.contains(version, prereleases=True):
            wrong.append(f"{asked.name} {version} is installed (needed: {asked.specifier})")
    if wrong:
        yield Finding("packages", "problem", f"{'; '.join(wrong)}; reinstall the project (docs/first-steps.md)")
    else:
        yield Finding("packages", "ok", f"{seen} packages as pyproject.toml requires")


def _requirements() -> list[str]:
    """The requirements of the checkout, or of the installed package."""
    checkout = Path(__file__).parents[3] / "pyproject.toml"
    if checkout.exists():
        return list(tomllib.loads(checkout.read_text(encoding="utf-8"))["project"]["dependencies"])
    return metadata.requires(_PROJECT) or []


def device(plan: Plan) -> Iterator[Finding]:
    """Whether the device of [cluster] is there, with a core or a GPU for each worker."""
    cluster, name = plan.settings.cluster, "device"
    wanted, workers = cluster.device, cluster.nproc_per_node
    if cluster.launcher != "local":
        yield Finding(name, "ok", f"{wanted}, on {cluster.launcher} nodes; run there: python -m trainer --doctor")
        return
    if wanted == "cpu":
        cores = available_cores()
        level: Level = "warning" if workers > cores else "ok"
        more = "; lower [cluster] nproc_per_node" if workers > cores else ""
        yield Finding(name, level, f"cpu: {cores} cores for {workers} workers{more}" if workers > 1 or more else
                      f"cpu: {cores} cores")  # fmt: skip
        return
    said = _trainers_doctor()
    if isinstance(said, str):
        yield Finding(name, "problem", f"python -m trainer --doctor: {said}")
        return
    if wanted == "auto":
        wanted = "cuda" if said["gpus"] else "neuron" if said["neuron_cores"] else "auto"
    plan.device = wanted
    yield from _of_facts(wanted, workers, said)


def _of_facts(wanted: str, workers: int, said: dict[str, Any]) -> Iterator[Finding]:
    name, gpus = "device", said["gpus"]
    if wanted == "cuda":
        more = "lower [cluster] nproc_per_node, or choose another device"
        if not gpus:
            yield Finding(name, "problem", "cuda: torch sees no GPU; check the driver with nvidia-smi, and that torch "
                          "is a CUDA build, or choose another [cluster] device")  # fmt: skip
        elif len(gpus) < workers:
            yield Finding(name, "problem", f"cuda: {len(gpus)} GPUs for {workers} workers; {more}")
        else:
            yield Finding(name, "ok", f"cuda: {len(gpus)} × {gpus[0]} for {workers} workers")
    elif wanted.startswith("neuron"):
        yield from _of_neuron(wanted, workers, said)
    elif wanted == "xla" and "torch-xla" not in said["versions"]:
        yield Finding(name, "problem", "xla: torch-xla is not installed; install the release for this torch, or choose "
                      "another [cluster] device")  # fmt: skip
    else:
        yield Finding(name, "ok", f"{wanted}: {available_cores()} cores, no GPU, no NeuronCore")


def _of_neuron(wanted: str, workers: int, said: dict[str, Any]) -> Iterator[Finding]:
    for problem in said["neuron_problems"]:
        yield Finding("torch-neuronx", "problem", problem)
    lane, cores = said["neuron_lane"], said["neuron_cores"]
    if lane is not None and wanted not in ("neuron", lane):
        yield Finding(
            "torch-neuronx", "problem",
            f"[cluster] device = {wanted}, and {said['neuron_why']}; set it to {lane} or neuron, or install the other "
            f"lane in a new environment (docs/trainium.md)",
        )  # fmt: skip
    elif lane is not None and not said["neuron_problems"]:
        yield Finding("torch-neuronx", "ok", f"{lane}: {said['neuron_why']}")
    wrong = said["neuron_error"] if cores is None else None
    if cores is not None and lane == XLA:
        try:
            check_workers(workers, cores, os.environ.get("NEURON_RT_VISIBLE_CORES"))
        except UserError as error:
            wrong = str(error)
    elif cores is not None and cores < workers:
        wrong = (
            f"{cores} NeuronCores for {workers} workers; lower [cluster] nproc_per_node to {cores}, with the same "
            f"global batch"
        )
    if wrong is None:
        yield Finding("device", "ok", f"{wanted}: {cores} NeuronCores for {workers} workers")
    else:
        yield Finding("device", "problem", f"{wanted}: {wrong}")


def _trainers_doctor() -> dict[str, Any] | str:
    """What `python -m trainer --doctor` finds, in a process that may import torch; or why it reports nothing."""
    words = [sys.executable, "-m", "trainer.machine.doctor"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"no answer within {_TIMEOUT_S} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])  # imported packages may print lines of their own
    return facts


def shared_memory(plan: Plan) -> Iterator[Finding]:
    """/dev/shm, over which workers of one machine exchange gradients (NCCL), and pools share semaphores."""
    cluster = plan.settings.cluster
    if cluster.launcher != "local" or sys.platform != "linux":
        return
    needs = _FOR_NCCL if (plan.device or cluster.device) == "cuda" and cluster.nproc_per_node > 1 else _FOR_POOLS
    remedy = "in a container: --shm-size=1g, or an emptyDir with medium: Memory"
    if not _SHARED_MEMORY.is_dir() or not os.access(_SHARED_MEMORY, os.W_OK):
        yield Finding("shared memory", "problem", f"{_SHARED_MEMORY} is missing or not writable; {remedy}")
        return
    free = shutil.disk_usage(_SHARED_MEMORY).free
    if free < needs:
        yield Finding(
            "shared memory", "problem",
            f"{_SHARED_MEMORY} has {size(free)} free, the processes of a run share up to {size(needs)}; {remedy}",
        )  # fmt: skip
    else:
        yield Finding("shared memory", "ok", f"{size(free)} free in {_SHARED_MEMORY}")
