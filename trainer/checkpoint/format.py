"""The native checkpoint format.

    ckpt_<global step>/
      model-00-of-02.safetensors       parameters under Hugging Face's names, one file per tensor-parallel rank
      optimizer-00-of-02.safetensors   exp_avg.<name>, exp_avg_sq.<name>, split like their parameters; with bf16-master
                                       also master.<name>, the fp32 weights that the model's are rounded from
      state.json                       `TrainState`
      manifest.json                    sizes and sha256 of all of the above, and its own; written last

If a master copy exists, all readers use it as the weights, and converted or merged checkpoints hold it in their place.

A rank's file holds its shards of the parameters that `trainer/parallel/plan.py` splits, without padding, and all other
parameters whole; concatenating the shards along the split axis gives the whole parameter. All files list their tensors
in the same order and store the global step in their header.

safetensors files are written here, not by the library, so that they are hashed while written, fsynced, and need no
second copy of the state in memory. The library can read them.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.files import durable_file, fsync_directory, write_json
from trainer.checkpoint.directory import MANIFEST, encode_manifest
from trainer.checkpoint.tensor_file import Spec, TensorFile, write_tensor_file
from trainer.state import STATE

#: Prefix, in the optimizer's file, of the fp32 master weights of bf16 parameters.
MASTER = "master"


def tensor_file(kind: str, rank: int, size: int) -> str:
    """The file name of a rank's tensors: `model-00-of-01.safetensors` for kind `model`, rank 0 of 1."""
    return f"{kind}-{rank:02}-of-{size:02}.safetensors"


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, Any]:
    """Write CPU tensors as a safetensors file, durably; returns {"path", "bytes", "sha256"}. Raises `DiskError`."""
    specs = {name: Spec.of(tensor) for name, tensor in tensors.items()}
    return write_tensor_file(path, tensors.items(), specs, metadata)


def read_tensors(path: Path, wanted: Callable[[str], bool] = lambda name: True) -> Iterator[tuple[str, Tensor]]:
    """Yield the `wanted` tensors of a safetensors file as (name, CPU tensor). Raises `CheckpointError`.

    The library would map the file: an I/O error, or truncation during the read, would kill the process with SIGBUS and
    no message.
    """
    with contextlib.closing(TensorFile(path)) as file:
        for name, spec in file.specs.items():
            if wanted(name):
                tensor = torch.empty(spec.shape, dtype=spec.dtype)
                file.read(name, 0, tensor)
                yield name, tensor


def has_master(path: Path) -> bool:
    """Whether an optimizer's file holds master weights; False if it does not exist. Raises `CheckpointError`."""
    if not path.exists():
        return False
    with contextlib.closing(TensorFile(path)) as file:
        return any(name.startswith(f"{MASTER}.") for name in file.specs)


def write_manifest(
    directory: Path, step: int, state: dict[str, Any], files: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Write state.json, then the manifest of it and `files`; returns {"path", "bytes", "sha256"} of all files.

    Raises `DiskError`.
    """
    write_json(directory / STATE, state)
    content = (directory / STATE).read_bytes()
    files = [*files, {"path": STATE, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}]
    manifest = encode_manifest(step, files)
    with durable_file(directory / MANIFEST) as file:
        file.write(manifest)
    fsync_directory(directory)
    return [*files, {"path": MANIFEST, "bytes": file.bytes, "sha256": file.sha256}]
