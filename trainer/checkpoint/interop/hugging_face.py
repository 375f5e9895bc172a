"""Hugging Face directories: config.json with model.safetensors or pytorch_model.bin, in one file or sharded.

Ours may also hold optimizer.safetensors: the whole moments, as `exp_avg.<name>` and `exp_avg_sq.<name>`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.errors import CheckpointError, UserError
from common.files import read_json
from trainer.checkpoint.interop.contents import Contents
from trainer.checkpoint.interop.foreign import sizes_of, untie
from trainer.checkpoint.interop.sources import Mapped, Renamed, Source, load_pickle, tensors_of
from trainer.checkpoint.tensor_file import TensorFile
from trainer.models.config import ModelConfig

CONFIG = "config.json"
OPTIMIZER_FILE = "optimizer.safetensors"
#: Single file and shard index, in search order.
_WEIGHTS = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)


def recognise(path: Path) -> bool:
    return path.is_dir() and any((path / name).exists() for pair in _WEIGHTS for name in pair)


def read(path: Path, *, optimizer: bool) -> Contents:
    """Raises `CheckpointError` for a missing shard or tensor of the index and for a model that is not a BERT."""
    whole, index = next(pair for pair in _WEIGHTS if any((path / name).exists() for name in pair))
    if (path / whole).exists():
        weights = {path / whole: _source(path / whole)}
        source = weights[path / whole]
    else:
        weights = _shards(path, path / index)
        source = Renamed({name: (shard, name) for shard in weights.values() for name in shard.specs})
    model, tied = untie([source], [path])
    moments: list[Source] = []
    if optimizer and (path / OPTIMIZER_FILE).exists():
        moments = [TensorFile(path / OPTIMIZER_FILE)]
    first = next(iter(weights.values()))
    step = first.metadata.get("step", "") if isinstance(first, TensorFile) else ""
    files = [*weights, *(p for name in (CONFIG, OPTIMIZER_FILE, index) if (p := path / name).exists())]
    return Contents(
        path=path,
        format="hf",
        form=f"Hugging Face directory, {'one file' if len(weights) == 1 else f'{len(weights)} shards'}"
        f" ({'safetensors' if whole.endswith('safetensors') else '.bin'})",
        step=int(step) if step.isdigit() else None,
        model=model,
        optimizer=moments,
        tied=tied,
        config=_config(path / CONFIG),
        files=sizes_of(files),
    )


def _source(path: Path) -> Source:
    if path.suffix == ".safetensors":
        return TensorFile(path)
    return Mapped(path, tensors_of(path, load_pickle(path), what="the file"))


def _shards(path: Path, index: Path) -> dict[Path, Source]:
    places = (read_json(index) or {}).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{index} holds no weight_map; copy it again")
    shards: dict[Path, Source] = {}
    for name in dict.fromkeys(places.values()):
        if Path(name).name != name or not (path / name).is_file():
            raise CheckpointError(f"{path / name} is missing: {index.name} names it; copy it again")
        shards[path / name] = _source(path / name)
    for file, shard in shards.items():
        listed = {tensor for tensor, name in places.items() if name == file.name}
        for tensor in sorted(listed ^ set(shard.specs)):
            verb = "lacks" if tensor in listed else "holds"
            other = "has it" if tensor in listed else "does not know of"
            raise CheckpointError(f"{file} {verb} {tensor}, which {index.name} {other}; copy the directory again")
    return shards


def _config(path: Path) -> ModelConfig | None:
    config: dict[str, Any] | None = read_json(path)
    if config is None:
        if path.exists():
            raise CheckpointError(f"{path} is not a JSON object; copy it again")
        return None
    try:
        return ModelConfig.of_hugging_face(config)
    except UserError as error:
        raise CheckpointError(f"{path}: {error}") from error
