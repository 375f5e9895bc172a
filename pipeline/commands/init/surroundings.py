"""What is here, found without asking anyone: cores, memory, GPUs, NeuronCores, Slurm, Kubernetes."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from common.errors import UserError
from common.process import available_cores
from pipeline.launchers.tools import run_tool
from pipeline.settings.cluster import CHIPS, EFA, INSTANCE_LABEL, limit_s

_GPU = "nvidia.com/gpu"


@dataclass(frozen=True)
class Gpus:
    name: str
    count: int
    #: Memory of one, in MiB; None: not known.
    mib: int | None


@dataclass(frozen=True)
class Nodes:
    """The machines that a scheduler has, or one partition of them."""

    count: int
    #: GPUs of one; 0: none.
    gpus: int = 0
    #: Type of the instance (trn1.32xlarge); empty: not known.
    instance: str = ""
    #: Slurm: the partition and its time limit in seconds.
    partition: str = ""
    limit_s: int | None = None
    #: Kubernetes: what one node can give to a pod, by name; a claim that many pods can mount.
    resources: Mapping[str, int] | None = None
    claim: str = ""


@dataclass(frozen=True)
class Surroundings:
    """This machine, and what it can send jobs to."""

    cores: int
    memory_bytes: int
    gpus: Gpus | None
    #: Logical NeuronCores, and the type of the instance.
    neuron_cores: int | None
    instance: str
    slurm: Nodes | None
    kubernetes: Nodes | None

    @classmethod
    def look(cls) -> Surroundings:
        from trainer.devices.neuron_lane import instance_type

        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return cls(available_cores(), memory, gpus(), neuron_cores(), instance_type(), _slurm(), _kubernetes())

    def __str__(self) -> str:
        said = [f"{self.cores} cores", f"{self.memory_bytes / 1e9:.0f} GB memory"]
        said.append(f"{self.gpus.count} × {self.gpus.name}" if self.gpus else "no GPU")
        said.append(f"{self.neuron_cores} NeuronCores" if self.neuron_cores else "no NeuronCore")
        said += [f"Slurm with {self.slurm.count} nodes"] if self.slurm else []
        said += [f"Kubernetes with {self.kubernetes.count} nodes"] if self.kubernetes else []
        return ", ".join(said)

    @property
    def suggests(self) -> tuple[str, str]:
        """What to make a configuration for, and why."""
        if self.neuron_cores:
            family = self.instance[:4] if self.instance[:4] in ("trn1", "trn3") else "trn2"
            return family, f"neuron-ls lists {self.neuron_cores} NeuronCores"
        if self.gpus:
            return "gpu", f"nvidia-smi lists {self.gpus.count} × {self.gpus.name}"
        if self.slurm:
            return "slurm", "sinfo answers, and this machine has no device of its own"
        if self.kubernetes:
            return "kubernetes", "kubectl answers, and this machine has no device of its own"
        return "laptop", "no GPU, NeuronCore, Slurm or Kubernetes was found here"


def _output(*words: str) -> str | None:
    """What a tool says; None if it is not here or fails."""
    if shutil.which(words[0]) is None:
        return None
    done = run_tool(*words, absent="")
    return done.stdout if done.returncode == 0 else None


def gpus() -> Gpus | None:
    said = _output("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits") or ""
    rows = [[cell.strip() for cell in line.split(",")] for line in said.splitlines() if "," in line]
    if not rows:
        return None
    mib = [int(row[1]) for row in rows if row[1].isdigit()]
    return Gpus(rows[0][0], len(rows), min(mib) if len(mib) == len(rows) else None)


def neuron_cores() -> int | None:
    from trainer.devices.neuron_lane import cores

    try:
        return cores() or None
    except UserError:
        return None


def _slurm() -> Nodes | None:
    """The default partition, as sinfo describes it."""
    said = _output("sinfo", "--noheader", "--format=%P|%D|%G|%f|%l")
    rows = [line.split("|") for line in (said or "").splitlines() if line.count("|") == 4]
    if not rows:
        return None
    name = next((row[0] for row in rows if row[0].endswith("*")), rows[0][0])
    ours = [row for row in rows if row[0] == name]
    gpus = [int(count) for row in ours for count in re.findall(r"gpu(?::[^:,()]+)?:(\d+)", row[2])]
    instances = [instance for row in ours for instance in re.findall(r"\btrn\d\w*\.\w+", row[3])]
    limit = ours[0][4]
    return Nodes(
        sum(int(row[1]) for row in ours), gpus=min(gpus, default=0), instance=instances[0] if instances else "",
        partition=name.rstrip("*"), limit_s=limit_s(limit) if limit[:1].isdigit() else None,
    )  # fmt: skip


def _kubernetes() -> Nodes | None:
    """The nodes of the most common instance type with devices, else of the most common of all."""
    said = _output("kubectl", "get", "nodes", "--output=json", "--request-timeout=5s")
    items = json.loads(said)["items"] if said else []
    if not items:
        return None
    found: Counter[tuple[str, tuple[tuple[str, int], ...]]] = Counter()
    for item in items:
        can_give = item.get("status", {}).get("allocatable", {})
        resources = {name: int(can_give[name]) for name in (_GPU, CHIPS, EFA) if str(can_give.get(name, "")).isdigit()}
        found[item["metadata"].get("labels", {}).get(INSTANCE_LABEL, ""), tuple(resources.items())] += 1
    (instance, most), count = max(found.items(), key=lambda pair: (bool(pair[0][1]), pair[1]))
    claims = _output("kubectl", "get", "persistentvolumeclaims", "--output=json", "--request-timeout=5s")
    shared = [
        claim["metadata"]["name"]
        for claim in (json.loads(claims)["items"] if claims else [])
        if "ReadWriteMany" in claim.get("spec", {}).get("accessModes", [])
    ]
    given = dict(most)
    return Nodes(count, given.get(_GPU, 0), instance, resources=given, claim=shared[0] if shared else "")
