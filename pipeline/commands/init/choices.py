"""What `init` writes for each kind of machine: which of the project's configurations, and what is changed in them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from common.errors import UserError
from pipeline.commands.init.draft import Draft
from pipeline.commands.init.surroundings import Nodes, Surroundings
from pipeline.settings.cluster import CHIPS, EFA, INSTANCE_LABEL
from stages.text.corpus import kind_of
from stages.text.patterns import expand
from trainer.models.config import ModelConfig

_GPU_CONFIG, _SLURM_CONFIG = "configs/gpu-bert-large.cfg", "configs/slurm-two-nodes.cfg"
_TRAINIUM = {family: f"configs/{family}-bert-large.cfg" for family in ("trn1", "trn2", "trn3")}
#: Examples made from text with the tutorial's numbers, instead of the tutorial's ready-made ones.
_FROM_TEXT = "configs/trn1-wikipedia.cfg"
_OF_TEXT = ("masked_lm_prob", "final_masked_lm_prob", "pack")
#: Memory of the GPU that the configuration's micro-batches are sized for, in MiB; they shrink in proportion on less.
_CONFIGS_GPU_MIB = 80_000
#: Bytes of text per shard, as in English Wikipedia's 1,024 shards (14 GB), and the least and most shards.
_BYTES_OF_SHARD, _LEAST_SHARDS, _MOST_SHARDS = 14_000_000, 4, 1024
#: Workers and devices of the instances of AWS's tutorials, where others are not known.
_WORKERS = {"trn1": 32, "trn2": 64, "trn3": 64}
_TUTORIAL = Nodes(2, instance="trn1.32xlarge", resources={CHIPS: 16, EFA: 8})
#: Chips → workers of an instance (docs/cluster.md).
_WORKERS_OF_CHIP = {"trn1": 2, "trn2": 4, "trn3": 4}


@dataclass(frozen=True)
class Text:
    """What to train on."""

    #: As [corpus] source has it.
    source: str
    #: Of text, estimated from the sizes of the files.
    bytes: int

    @classmethod
    def of(cls, path: str) -> Text:
        """The text at a path or glob, from wherever the pipeline is started. Raises `UserError` if it names no file."""
        files = expand(path)
        whole = os.path.abspath(path)
        if "${" in whole:
            raise UserError(f"--text {path}: ${{ stands for a variable in a settings file; rename it")
        text_bytes = sum(kind_of(file).estimated_text_bytes(file, os.path.getsize(file)) for file in files)
        return cls(shlex.quote(whole).replace("%", "%%"), text_bytes)


def draft_for(target: str, seen: Surroundings, text: Text | None, folder: Path) -> tuple[Draft, list[str]]:
    """The settings for a target of `CHOICES`, and what only a person can know or do, one line each."""
    draft = Draft()
    missing = CHOICES[target](draft, seen, folder)
    if text is not None:
        draft.set("corpus", "source", text.source)
        if target != "laptop":
            missing += _examples_of(draft, text, folder)
    else:
        missing += _absent_files(draft, folder)
    draft.fit_batches()
    if not draft.text("dataset", "phase1_url"):
        draft.keep("corpus", "source")
    draft.keep("model", "preset")
    draft.keep("cluster", "device", "nproc_per_node")
    return draft, missing


def _laptop(draft: Draft, seen: Surroundings, folder: Path) -> list[str]:
    draft.keep("run", "work_dir")
    draft.keep("phase1", "max_steps")
    draft.keep("phase2", "max_steps")
    return []


def _gpu(draft: Draft, seen: Surroundings, folder: Path) -> list[str]:
    draft.take(_GPU_CONFIG)
    _set_gpus(draft, seen.gpus.count if seen.gpus else None, seen.gpus.mib if seen.gpus else None)
    return [] if seen.gpus else ["[cluster] nproc_per_node: nvidia-smi was not found, so 8 GPUs are assumed"]


def _set_gpus(draft: Draft, count: int | None, mib: int | None) -> None:
    if count is not None:
        draft.set("cluster", "nproc_per_node", count, "Workers on a machine: one for each GPU")
    for section in ("phase1", "phase2"):
        size = draft.value(section, "micro_batch_size")
        if mib is not None and mib < 0.95 * _CONFIGS_GPU_MIB:
            size = max(1, size * mib // _CONFIGS_GPU_MIB)
            size = 1 << (size.bit_length() - 1)
            why = f"Rows in one micro-step of one worker: computed for {mib:,} MiB, not measured"
            draft.set(section, "micro_batch_size", size, why)


def _trainium(family: str) -> Callable[[Draft, Surroundings, Path], list[str]]:
    def fill(draft: Draft, seen: Surroundings, folder: Path) -> list[str]:
        draft.take(_TRAINIUM[family])
        if seen.neuron_cores:
            draft.set("cluster", "nproc_per_node", seen.neuron_cores, "Workers on a machine: one for each NeuronCore")
            return []
        return [f"[cluster] nproc_per_node: neuron-ls was not found, so {_WORKERS[family]} NeuronCores are assumed"]

    return fill


def _slurm(draft: Draft, seen: Surroundings, folder: Path) -> list[str]:
    nodes = seen.slurm or replace(_TUTORIAL, resources=None)
    _of_nodes(draft, nodes)
    draft.take(_SLURM_CONFIG, "slurm")
    draft.set("cluster", "launcher", "slurm")
    if nodes.partition:
        draft.set("slurm", "partition", nodes.partition, "The default partition")
    if nodes.limit_s is not None and nodes.limit_s < 24 * 3600:
        hours, rest = divmod(nodes.limit_s, 3600)
        draft.set("slurm", "time_limit", f"{hours}:{rest // 60:02}:{rest % 60:02}", "The partition's limit")
        draft.set("slurm", "signal_s", min(600, max(1, nodes.limit_s // 4)))
    if nodes.gpus:
        draft.set("slurm", "sbatch_lines", f"--exclusive\n--gres=gpu:{nodes.gpus}")
    missing = ["[run] work_dir: this folder must be on a file system that all nodes share"]
    if seen.slurm is None:
        missing.append("[cluster], [slurm]: sinfo does not answer here, so two trn1.32xlarge are assumed")
    return missing


def _kubernetes(draft: Draft, seen: Surroundings, folder: Path) -> list[str]:
    nodes = seen.kubernetes or _TUTORIAL
    _of_nodes(draft, nodes)
    draft.set("cluster", "launcher", "kubernetes")
    places = (folder.absolute(), *folder.absolute().parents)
    mount = next((place for place in places if os.path.ismount(place)), Path("/"))
    is_guessed = mount == Path("/")
    if is_guessed:
        mount = Path("/shared")
    work = folder.absolute() / "work" if folder.absolute().is_relative_to(mount) else mount / "work"
    draft.set("run", "work_dir", str(work).replace("%", "%%"))
    draft.set("kubernetes", "image", "REGISTRY/bert-pretraining-pipeline")
    draft.set("kubernetes", "volume_claim", nodes.claim or "shared")
    draft.set("kubernetes", "mount_path", str(mount).replace("%", "%%"))
    resources = " ".join(f"{name}={count}" for name, count in (nodes.resources or {}).items())
    draft.set("kubernetes", "pod_resources", resources)
    if nodes.instance:
        draft.set("kubernetes", "node_selector", f"{INSTANCE_LABEL}={nodes.instance}")
    missing = ["[kubernetes] image: where you have pushed the image that containers/ builds"]
    if guessed := [*([] if nodes.claim else ["volume_claim"]), *(["mount_path"] if is_guessed else [])]:
        missing.append(f"[kubernetes] {', '.join(guessed)}: a volume that all pods and this machine share")
    if seen.kubernetes is None:
        missing.append("[cluster], [kubernetes]: kubectl does not answer here, so two trn1.32xlarge are assumed")
    return missing


def _of_nodes(draft: Draft, nodes: Nodes) -> None:
    """Train on a scheduler's nodes: on two of them, if there are two."""
    family = nodes.instance[:4]
    if nodes.gpus:
        draft.take(_GPU_CONFIG)
        _set_gpus(draft, nodes.gpus, None)
    elif family == "trn1":
        draft.take(_SLURM_CONFIG, "dataset", "model", "phase1", "phase2", "cluster", "evaluation")
        draft.drop("cluster", "launcher")
    elif family in _WORKERS:
        draft.take(_TRAINIUM[family])
        draft.drop("cluster", "spot_watch")
    if family in _WORKERS:
        chips = (nodes.resources or {}).get(CHIPS)
        workers = _WORKERS[family] if chips is None else chips * _WORKERS_OF_CHIP[family]
        draft.set("cluster", "nproc_per_node", workers, "Workers on a machine: one for each NeuronCore")
    draft.set("cluster", "nnodes", min(2, nodes.count))
    draft.set(
        "cluster", "join_timeout_s", 1200, "Seconds that machines wait for each other: whole nodes may start late"
    )


def _examples_of(draft: Draft, text: Text, folder: Path) -> list[str]:
    """Make the examples from a text instead of downloading them; returns what to look at."""
    source = draft.text("corpus", "source")
    draft.take(_FROM_TEXT, "corpus", "dataset")
    draft.set("corpus", "source", source)
    draft.drop("dataset", "phase1_url", "phase2_url")
    for section in ("phase1", "phase2"):
        for key in _OF_TEXT:
            draft.take_one(_FROM_TEXT, section, key)
    shards = min(_MOST_SHARDS, max(_LEAST_SHARDS, text.bytes // _BYTES_OF_SHARD))
    draft.set("dataset", "shards", shards)
    draft.drop("corpus", "held_out")
    draft.drop("model", "vocab_size")
    if not (folder / draft.text("corpus", "vocab_file")).is_file():
        draft.drop("corpus", "vocab_file")
        draft.set("corpus", "vocab_size", ModelConfig().vocab_size)
    rows, batch = text.bytes // (4 * draft.value("phase1", "seq_len")), draft.value("phase1", "global_batch_size")
    if rows < batch:
        return [f"[phase1] global_batch_size: a step takes {batch:,} rows, and this text has about {rows:,}"]
    return []


def _absent_files(draft: Draft, folder: Path) -> list[str]:
    """The files that the configuration names and that are not there yet."""
    names = (draft.text("corpus", key) for key in ("source", "vocab_file"))
    absent = [name for name in names if name not in ("", "builtin") and not (folder / name).exists()]
    if not absent:
        return []
    return [f"[corpus] {' and '.join(absent)} {'are' if len(absent) > 1 else 'is'} not in {folder.absolute()} yet "
            f"(docs/data.md); or give your own: --text PATH"]  # fmt: skip


#: What fills a draft, by the name that `--for` takes; each returns what only a person can know.
CHOICES: dict[str, Callable[[Draft, Surroundings, Path], list[str]]] = {
    "laptop": _laptop,
    "gpu": _gpu,
    **{family: _trainium(family) for family in _TRAINIUM},
    "slurm": _slurm,
    "kubernetes": _kubernetes,
}
