"""Our own checkpoints (trainer/checkpoint/format.py), of any tensor-parallel size."""

from __future__ import annotations

import json
import re
from pathlib import Path

from trainer.checkpoint.format import MANIFEST, STATE, why_invalid
from trainer.checkpoint.interop.contents import KINDS, MODEL, OPTIMIZER, Contents
from trainer.checkpoint.tensor_file import TensorFile
from trainer.config import ModelConfig
from trainer.errors import CheckpointError
from trainer.files import sha256_of
from trainer.state import TrainState

_FILE = re.compile(r"(model|optimizer)-(\d+)-of-(\d+)\.safetensors")


def recognise(path: Path) -> bool:
    return path.is_dir() and ((path / MANIFEST).is_file() or (path / STATE).is_file())


def read(path: Path, *, optimizer: bool) -> Contents:
    """Raises `CheckpointError`: files missing, of another size or step. Their sha256 is checked while they are read."""
    reason = why_invalid(path, verify=False)
    if reason is not None:
        raise CheckpointError(f"checkpoint {path} cannot be used: {reason}; give another one")
    manifest = json.loads((path / MANIFEST).read_bytes())
    entries = {entry["path"]: entry for entry in manifest["files"]}
    if STATE not in entries or sha256_of(path / STATE) != entries[STATE]["sha256"]:
        raise CheckpointError(f"checkpoint {path} cannot be used: {STATE} is damaged or not in its {MANIFEST}")
    state = TrainState.read(path)
    kinds = KINDS if optimizer else (MODEL,)
    shards: dict[str, list[TensorFile]] = {kind: [] for kind in kinds}
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
                    f"{manifest['step']}; put the right one in its place"
                )
            shards[kind].append(file)
    if not shards[MODEL] or len(shards.get(OPTIMIZER) or shards[MODEL]) != len(shards[MODEL]):
        raise CheckpointError(f"{path}: its {MANIFEST} does not list as many files of the optimizer as of the model")
    return Contents(
        path=path,
        format="native",
        form="this project's checkpoint",
        step=manifest["step"],
        model=shards[MODEL],
        optimizer=shards.get(OPTIMIZER, ()),
        config=ModelConfig(**state.model),
        state=state,
        epoch=state.epoch,
        files={path / name: entry["bytes"] for name, entry in entries.items()},
    )
