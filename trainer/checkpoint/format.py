"""The files of a checkpoint.

    ckpt_<global step>/
      model-00-of-01.safetensors       parameters under Hugging Face's names, one file per tensor-parallel rank
      optimizer-00-of-01.safetensors   exp_avg.<name>, exp_avg_sq.<name>
      state.json                       `TrainState`
      manifest.json                    sizes and sha256 of the above, and its own; written last

safetensors files are written here rather than by the library because this way they are hashed while they are
written, fsynced, and no second copy of the state is in memory. The library reads them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainer.errors import CheckpointError
from trainer.files import durable_file, sha256_of

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
STATE = "state.json"
#: Names of the dtypes in safetensors headers.
_DTYPES = {torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}


def tensor_file(kind: str, rank: int, size: int) -> str:
    """`model-00-of-01.safetensors` for kind `model`, tensor-parallel rank 0 of 1."""
    return f"{kind}-{rank:02}-of-{size:02}.safetensors"


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, Any]:
    """Write CPU tensors as a safetensors file, durably; returns {"path", "bytes", "sha256"}. Raises `DiskError`."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with durable_file(path) as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors.values():
            if tensor.numel():
                file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return {"path": path.name, "bytes": file.bytes, "sha256": file.sha256}


def read_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a safetensors file, one at a time, on the CPU. Raises `CheckpointError`."""
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dictionary)
                yield name, file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors ({error}); use another checkpoint") from error


def encode_manifest(step: int, files: list[dict[str, Any]]) -> bytes:
    """The bytes of a checkpoint's manifest; they contain a sha256 of their own content."""
    content = {"format": "native", "version": FORMAT_VERSION, "step": step, "files": files}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**content, "sha256": digest}, indent=2) + "\n").encode()


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
