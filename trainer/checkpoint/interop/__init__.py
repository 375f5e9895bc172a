"""Read and write checkpoints of all formats, one tensor at a time.

`open_checkpoint` detects the format (`FORMATS`) and lists the tensors (`contents`); `join.Checkpoint` joins shards into
whole tensors; `WRITERS` in `write` maps each output format to its writer. A new format is a module and an entry there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from common.errors import CheckpointError
from trainer.checkpoint.interop import hugging_face, native, neuronx, tutorial
from trainer.checkpoint.interop.contents import Contents


class _Reader(Protocol):
    def __call__(self, path: Path, *, optimizer: bool) -> Contents: ...


@dataclass(frozen=True)
class Format:
    """A readable format."""

    name: str
    recognise: Callable[[Path], bool]
    read: _Reader


FORMATS = (
    Format("native", native.recognise, native.read),
    Format("hf", hugging_face.recognise, hugging_face.read),
    Format("nxd", neuronx.recognise, neuronx.read),
    Format("pt", tutorial.recognise, tutorial.read),
)


def open_checkpoint(path: Path, *, optimizer: bool = True) -> Contents:
    """Open the checkpoint at `path`, with its optimizer state if `optimizer`. Raises `CheckpointError`."""
    if not path.exists():
        raise CheckpointError(f"there is no checkpoint {path}; check the path")
    for form in FORMATS:
        if form.recognise(path):
            return form.read(path, optimizer=optimizer)
    raise CheckpointError(
        f"{path} is not a checkpoint of a known format; allowed: a ckpt_<step> directory of this project (finished, "
        f"with its manifest.json), a Hugging Face directory, a ckpt_<step>.pt, a directory of neuronx-distributed"
    )
