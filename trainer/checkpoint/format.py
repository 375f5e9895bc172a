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
written, fsynced, and no second copy of the state is in memory. The library reads them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainer.checkpoint.tensor_file import Spec, TensorFile, write_tensor_file
from trainer.errors import CheckpointError
from trainer.files import durable_file, fsync_directory, sha256_of, write_json

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
STATE = "state.json"
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
    """The `wanted` tensors of a safetensors file, by name, one at a time, on the CPU. Raises `CheckpointError`."""
    try:
        with safe_open(path, framework="pt") as file:
            for name in filter(wanted, file.keys()):
                yield name, file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors ({error}); use another checkpoint") from error


def has_master(path: Path) -> bool:
    """Whether an optimizer's file, which need not exist, holds the weights, too. Raises `CheckpointError`."""
    return path.exists() and any(name.startswith(f"{MASTER}.") for name in TensorFile(path).specs)


def encode_manifest(step: int, files: list[dict[str, Any]]) -> bytes:
    """The bytes of a checkpoint's manifest; they contain a sha256 of their own content."""
    content = {"format": "native", "version": FORMAT_VERSION, "step": step, "files": files}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**content, "sha256": digest}, indent=2) + "\n").encode()


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


def why_invalid(directory: Path, *, verify: bool = True) -> str | None:
    """Why `directory` is not a whole checkpoint, or None if it is. With `verify` every byte is read and checked."""
    try:
        raw = (directory / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return f"it has no {MANIFEST}: it was never finished"
    try:
        manifest = json.loads(raw)
        intact = raw == encode_manifest(manifest["step"], manifest["files"])
    except (ValueError, KeyError, TypeError):
        intact = False
    if not intact:
        return f"its {MANIFEST} is damaged"
    for entry in manifest["files"]:
        path = directory / entry["path"]
        if not path.is_file():
            return f"{path.name} is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{path.name} has {path.stat().st_size} bytes instead of {entry['bytes']}"
        if verify and sha256_of(path) != entry["sha256"]:
            return f"{path.name} is damaged: its sha256 is not the manifest's"
    return None
