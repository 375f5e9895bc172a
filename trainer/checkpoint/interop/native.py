"""Native checkpoints (trainer/checkpoint/format.py) of any tensor-parallel size."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path

from common.errors import CheckpointError, UserError
from common.files import sha256_of
from trainer.checkpoint.directory import MANIFEST, why_invalid
from trainer.checkpoint.format import MASTER
from trainer.checkpoint.interop.contents import KINDS, MODEL, OPTIMIZER, Contents
from trainer.checkpoint.interop.sources import Renamed, Source
from trainer.checkpoint.tensor_file import TensorFile
from trainer.models.config import ModelConfig
from trainer.precision import Precision
from trainer.state import STATE, TrainState

_FILE = re.compile(r"(model|optimizer)-(\d+)-of-(\d+)\.safetensors")


def recognise(path: Path) -> bool:
    return path.is_dir() and ((path / MANIFEST).is_file() or (path / STATE).is_file())


def read(path: Path, *, optimizer: bool) -> Contents:
    """Raises `CheckpointError` for a missing file or a wrong size or step; sha256 is checked while files are read."""
    reason = why_invalid(path, verify=False)
    if reason is not None:
        raise CheckpointError(f"checkpoint {path} cannot be used: {reason}; give another one")
    manifest = json.loads((path / MANIFEST).read_bytes())
    entries = {entry["path"]: entry for entry in manifest["files"]}
    if STATE not in entries or sha256_of(path / STATE) != entries[STATE]["sha256"]:
        raise CheckpointError(f"checkpoint {path} cannot be used: {STATE} is damaged or not in its {MANIFEST}")
    state = TrainState.read(path)
    config = _model_of(path, state)
    looks_for_master = Precision(state.precision).keeps_master
    kinds = KINDS if optimizer or looks_for_master else (MODEL,)
    shards: dict[str, list[TensorFile]] = {MODEL: [], OPTIMIZER: []}
    for kind in kinds:
        ranks = {int(m[2]): (name, int(m[3])) for name in entries if (m := _FILE.fullmatch(name)) and m[1] == kind}
        size = max((size for _, size in ranks.values()), default=0)
        for rank in range(size):
            if ranks.get(rank, ("", 0))[1] != size:
                raise CheckpointError(
                    f"{path} lacks the {kind} of tensor-parallel rank {rank} of {size}; copy it again"
                )
            name = ranks[rank][0]
            file = TensorFile(path / name, entries[name]["sha256"])
            if file.metadata.get("step") != str(manifest["step"]):
                raise CheckpointError(
                    f"{file.path} is of step {file.metadata.get('step')}, the other files of {path} are of step "
                    f"{manifest['step']}; replace it with the right one"
                )
            shards[kind].append(file)
    if not shards[MODEL] or len(shards[OPTIMIZER] or shards[MODEL]) != len(shards[MODEL]):
        raise CheckpointError(f"{path}: its {MANIFEST} does not list as many optimizer files as model files")
    model, moments = _with_master(shards) if looks_for_master else (shards[MODEL], shards[OPTIMIZER])
    return Contents(
        path=path,
        format="native",
        form="this project's checkpoint" + (", with an fp32 copy of its weights" if model != shards[MODEL] else ""),
        step=manifest["step"],
        model=model,
        optimizer=moments if optimizer else (),
        config=config,
        state=state,
        epoch=state.epoch,
        files={path / name: entry["bytes"] for name, entry in entries.items()},
    )


def _model_of(path: Path, state: TrainState) -> ModelConfig:
    """The checkpoint's BERT. Raises `CheckpointError` for another model, such as the workload mnist's."""
    unknown = state.model.keys() - {field.name for field in dataclasses.fields(ModelConfig)}
    if unknown:
        raise CheckpointError(
            f"{path} holds no BERT that this version knows: its model has {min(unknown)} = "
            f"{state.model[min(unknown)]}; give the checkpoint of a BERT"
        )
    try:
        return ModelConfig(**state.model)
    except UserError as error:
        raise CheckpointError(f"{path}: its model's {error}") from error


def _with_master(shards: dict[str, list[TensorFile]]) -> tuple[Sequence[Source], Sequence[Source]]:
    """The weights and the moments; the master weights replace the weights if they exist."""
    prefix = f"{MASTER}."
    masters, moments = (
        [
            Renamed({n.removeprefix(prefix): (file, n) for n in file.specs if n.startswith(prefix) is is_master})
            for file in shards[OPTIMIZER]
        ]
        for is_master in (True, False)
    )
    if not any(source.specs for source in masters):
        return shards[MODEL], shards[OPTIMIZER]
    for file in shards[MODEL]:
        file.close()
    return masters, moments if any(source.specs for source in moments) else ()
