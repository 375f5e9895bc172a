"""The files of a checkpoint.

    ckpt_<global step>/
      model-00-of-02.safetensors       parameters under Hugging Face's names, one file per tensor-parallel rank
      optimizer-00-of-02.safetensors   exp_avg.<name>, exp_avg_sq.<name>, split like their parameters; of bf16-master
                                       master.<name>, too, the fp32 weights that the model's are rounded from
      state.json                       `TrainState`
      manifest.json                    sizes and sha256 of all of the above, and its own; written last

Where there is a master copy, all readers take it for the weights, and what is made from them holds it in their place.

A rank's file holds its pieces of what `trainer/parallel/plan.py` splits, without padding, and all of the rest: the
whole of a parameter is its pieces, one after the other along the split axis. All files name their tensors in one order
and carry the global step in their header.

safetensors files are written here rather than by the library because this way they are hashed while they are
written, fsynced, and no second copy of the state is in memory. The library can read them.
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

#: What stands before a parameter's name for the fp32 weights of bf16 ones, in the optimizer's file.
MASTER = "master"


def tensor_file(kind: str, rank: int, size: int) -> str:
    """`model-00-of-01.safetensors` for kind `model`, tensor-parallel rank 0 of 1."""
    return f"{kind}-{rank:02}-of-{size:02}.safetensors"


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, Any]:
    """Write CPU tensors as a safetensors file, durably; returns {"path", "bytes", "sha256"}. Raises `DiskError`."""
    specs = {name: Spec.of(tensor) for name, tensor in tensors.items()}
    return write_tensor_file(path, tensors.items(), specs, metadata)


def read_tensors(path: Path, wanted: Callable[[str], bool] = lambda name: True) -> Iterator[tuple[str, Tensor]]:
    """The `wanted` tensors of a safetensors file, by name, one at a time, on the CPU. Raises `CheckpointError`.

    Not through the library, which maps the file into memory: an I/O error, or a file that is cut short while it is
    read, would end the process with SIGBUS and without a word.
    """
    with contextlib.closing(TensorFile(path)) as file:
        for name, spec in file.specs.items():
            if wanted(name):
                tensor = torch.empty(spec.shape, dtype=spec.dtype)
                file.read(name, 0, tensor)
                yield name, tensor


def has_master(path: Path) -> bool:
    """Whether an optimizer's file, which need not exist, holds the weights, too. Raises `CheckpointError`."""
    if not path.exists():
        return False
    with contextlib.closing(TensorFile(path)) as file:
        return any(name.startswith(f"{MASTER}.") for name in file.specs)


def write_manifest(
    directory: Path, step: int, state: dict[str, Any], files: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Write state.json and, last, the manifest of it and `files`; returns {"path", "bytes", "sha256"} of all files.

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
