"""Code shared by the readers of other tools' files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from common.errors import CheckpointError
from trainer.checkpoint.interop.names import MOMENTS, TIED, by_our_names, numbered_parameters
from trainer.checkpoint.interop.sources import Renamed, Source, TensorReference, source_of


def untie(ranks: Sequence[Source], places: Sequence[Path]) -> tuple[list[Source], dict[str, Sequence[Source]]]:
    """The ranks' tensors under our names without duplicates, in file order; and the duplicates by alias.

    `places`: the name of each rank in messages. Raises `CheckpointError`.
    """
    model: list[Source] = []
    tied: dict[str, list[Source]] = {}
    for source, place in zip(ranks, places, strict=True):
        names = by_our_names(source.specs, str(place))
        duplicates = {alias: names.pop(alias) for alias, ours in TIED.items() if alias in names and ours in names}
        for alias, name in duplicates.items():
            tied.setdefault(alias, []).append(Renamed({alias: (source, name)}))
        model.append(Renamed({TIED.get(ours, ours): (source, name) for ours, name in names.items()}))
    for alias, sources in tied.items():
        if len(sources) != len(model):
            raise CheckpointError(f"{alias} is in the files of {len(sources)} of {len(model)} ranks; copy them again")
    return model, dict(tied)


def moments_of(path: Path, optimizer: Any, model: Source) -> tuple[Source, int | None]:
    """The moments of a torch optimizer's state_dict from `path` as `<moment>.<parameter>`, and its step.

    `model`: the rank's parameters under our names, in model order. Raises `CheckpointError`.
    """
    if not isinstance(optimizer, Mapping) or not {"state", "param_groups"} <= set(optimizer):
        raise CheckpointError(f"{path}: its optimizer is not a torch state_dict; leave it out with --no-optimizer")
    shapes = {name: spec.shape for name, spec in model.specs.items()}
    named = numbered_parameters(optimizer, shapes, str(path))
    tensors, steps = {}, set()
    for moment in MOMENTS:
        for number, name in named.items():
            state = optimizer["state"].get(number, {})
            tensor = state.get(moment)
            if not isinstance(tensor, torch.Tensor | TensorReference):
                raise CheckpointError(f"{path} lacks {moment} of {name}; leave the optimizer out with --no-optimizer")
            tensors[f"{moment}.{name}"] = tensor
            steps.add(int(state["step"]) if "step" in state else None)
    if len(steps) != 1:
        raise CheckpointError(f"{path}: the optimizer's parameters are at different steps ({sorted(map(str, steps))})")
    return source_of(path, tensors), steps.pop()


def sizes_of(paths: Sequence[Path]) -> dict[Path, int]:
    """The size in bytes of each file; directories are searched recursively."""
    files = [file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    return {file: file.stat().st_size for file in files if file.is_file()}


def training_of(optimizer: Any, scheduler: Any, files: Any = None) -> dict[str, Any]:
    """The state of a torch optimizer and schedule that is kept besides the moments."""
    kept: dict[str, Any] = {}
    if isinstance(optimizer, Mapping):
        groups = optimizer.get("param_groups", ())
        kept["param_groups"] = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    if isinstance(scheduler, Mapping):
        kept["scheduler"] = dict(scheduler)
    if files:
        kept["files"] = list(files)
    return kept
