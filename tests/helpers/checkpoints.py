"""Checkpoints for tests of reading and writing them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from tests.helpers.support import MODEL, forked
from trainer.checkpoint.directory import MANIFEST, encode_manifest
from trainer.checkpoint.format import read_tensors, tensor_file
from trainer.checkpoint.interop.names import moment_names
from trainer.checkpoint.interop.write import entry_of
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.snapshot import Snapshot
from trainer.checkpoint.tensor_file import Spec, write_tensor_file
from trainer.models.bert import BertForPreTraining
from trainer.models.config import ModelConfig
from trainer.state import TrainState

#: With a vocabulary that ranks cannot share evenly.
CONFIG = ModelConfig(**{**MODEL, "vocab_size": 203})


def snapshot(step: int = 7, *, seed: int = 0, config: ModelConfig = CONFIG, optimizer: bool = True) -> Snapshot:
    """A state of random parameters and moments."""
    model = BertForPreTraining(config)
    generator = torch.Generator().manual_seed(seed)
    parameters = {n: torch.randn(p.shape, generator=generator) for n, p in model.named_parameters()}
    moments = {
        n: torch.rand(parameters[n.split(".", 1)[1]].shape, generator=generator) for n in moment_names(parameters)
    }
    state = TrainState(
        phase=1, step=step, global_step=step, samples_consumed=64 * step, epoch=2, seed=seed, global_batch_size=64,
        data="d", order_version=1, optimizer="AdamW", precision="fp32", model=dataclasses.asdict(config),
        data_parallel_size=2, tensor_parallel_size=1, micro_batch_size=8, torch_version="2",
    )  # fmt: skip
    return Snapshot(state, parameters, moments if optimizer else {})


def save(directory: Path, state: Snapshot) -> None:
    """`ckpt_<step>` in `directory`, as training leaves it."""
    manager = CheckpointManager(directory, keep=-1)
    manager.save(state)
    manager.finish()


def write_native(directory: Path, state: Snapshot, size: int = 1) -> Path:
    """A checkpoint in our format, split for `size` ranks by stages.convert."""
    step, seed = state.state.global_step, state.state.seed
    whole = directory / f"whole-{seed}" / f"ckpt_{step}"
    if not whole.exists():
        whole.parent.mkdir(parents=True, exist_ok=True)
        save(whole.parent, state)
    if size == 1:
        return whole
    out = directory / f"split-{size}-{step}-{seed}"
    done = forked("stages.convert", whole, out, "--tensor-parallel-size", size)
    assert done.returncode == 0, done.stdout
    return out / "checkpoint"


def rewrite(checkpoint: Path, change: Callable[[dict[str, Tensor]], None], *, step: str = "") -> None:
    """Change the parameters in the file of rank 1, and update the manifest to match."""
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    size = sum(entry["path"].startswith("model-") for entry in manifest["files"])
    path = checkpoint / tensor_file("model", 1, size)
    tensors = dict(read_tensors(path))
    change(tensors)
    specs = {name: Spec.of(tensor) for name, tensor in tensors.items()}
    write_tensor_file(path, tensors.items(), specs, {"format": "pt", "step": step or str(manifest["step"])})
    files = [entry_of(checkpoint / entry["path"]) for entry in manifest["files"]]
    (checkpoint / MANIFEST).write_bytes(encode_manifest(manifest["step"], files))


def write_config(path: Path, config: ModelConfig = CONFIG) -> Path:
    path.write_text(json.dumps(config.to_hugging_face()))
    return path


def contents(directory: Path) -> dict[str, bytes]:
    """The bytes of each file."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}
