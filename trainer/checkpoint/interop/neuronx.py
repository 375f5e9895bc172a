"""neuronx-distributed's tensor-parallel checkpoints: the formats of its two savers, each plain or xser.

    checkpointing.save            DIR/tp_rank_XX_pp_rank_00/checkpoint.pt
                        xser      DIR/tp_rank_XX_pp_rank_00, DIR/tp_rank_XX_pp_rank_00.tensors/tensor_N.pt
    trainer.save_checkpoint       DIR/{model,optim}/dp_rank_00_tp_rank_XX_pp_rank_00.pt, user_content.pt, scheduler.pt,
                                  checkpoint, done
                        xser      beside each such file its .pt.tensors/tensor_N.pt

No file records which tensors are split; see `join`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import CheckpointError
from trainer.checkpoint.interop.contents import Contents
from trainer.checkpoint.interop.foreign import moments_of, sizes_of, training_of, untie
from trainer.checkpoint.interop.sources import Source, load_pickle, source_of, tensors_of

_SAVE = re.compile(r"tp_rank_(\d+)_pp_rank_(\d+)")
_TRAINER = re.compile(r"dp_rank_(\d+)_tp_rank_(\d+)_pp_rank_(\d+)\.pt")
_STEP = re.compile(r"\D*(\d+)")


def recognise(path: Path) -> bool:
    if not path.is_dir():
        return False
    names = {child.name for child in path.iterdir()}
    return any(_SAVE.fullmatch(name) for name in names) or {"model", "checkpoint"} <= names or bool(_tags(path))


def read(path: Path, *, optimizer: bool) -> Contents:
    """Raises `CheckpointError` for a rank's missing file, differing steps, pipeline parallelism, an unfinished save."""
    if any(_SAVE.fullmatch(child.name) for child in path.iterdir()):
        return _read_saved(path, optimizer=optimizer)
    if not (path / "model").is_dir() and _tags(path):
        path = max(_tags(path), key=lambda tag: (int(m[1]) if (m := _STEP.fullmatch(tag.name)) else -1, tag.name))
    return _read_trainers(path, optimizer=optimizer)


def _tags(path: Path) -> list[Path]:
    """The finished checkpoints in `path`, a directory passed to trainer.save_checkpoint."""
    marked = [child for child in path.iterdir() if child.is_dir() and (child / "checkpoint").is_file()]
    return [tag for tag in marked if (tag / "done").is_file() and (tag / "model").is_dir()]


def _ranks(found: Mapping[int, Path], path: Path) -> list[Path]:
    for rank in range(max(found) + 1):
        if rank not in found:
            raise CheckpointError(
                f"{path} lacks the file of tensor-parallel rank {rank}; copy the whole directory again"
            )
    return [found[rank] for rank in sorted(found)]


def _refuse_pipeline(rank: str, path: Path) -> None:
    if int(rank):
        raise CheckpointError(f"{path} is of pipeline-parallel rank {int(rank)}; only models in one stage can be read")


def _read_saved(path: Path, *, optimizer: bool) -> Contents:
    found: dict[int, Path] = {}
    for child in path.iterdir():
        if m := _SAVE.fullmatch(child.name):
            _refuse_pipeline(m[2], child)
            found[int(m[1])] = child / "checkpoint.pt" if child.is_dir() else child
    files = _ranks(found, path)
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file} is missing; copy the whole directory again")
    loaded = [load_pickle(file) for file in files]
    for file, rank in zip(files, loaded, strict=True):
        if not isinstance(rank, dict) or "model" not in rank:
            raise CheckpointError(f"{file} holds no 'model'; only checkpoints saved with one can be read")
    _same("step", {file: rank.get("global_step") for file, rank in zip(files, loaded, strict=True)})
    form = "plain" if files[0].name == "checkpoint.pt" else "xser"
    first = loaded[0]
    return _contents(
        path,
        f"neuronx-distributed, checkpointing.save, {form}",
        {file: rank["model"] for file, rank in zip(files, loaded, strict=True)},
        {file: rank.get("optimizer") for file, rank in zip(files, loaded, strict=True)} if optimizer else {},
        first.get("scheduler"),
        {"global_step": first.get("global_step"), "epoch": first.get("epoch")},
    )


def _read_trainers(path: Path, *, optimizer: bool) -> Contents:
    if not (path / "done").is_file():
        raise CheckpointError(f"{path} has no file 'done': it was never finished; give another checkpoint")
    kinds = {}
    for kind in ("model", "optim") if optimizer and (path / "optim").is_dir() else ("model",):
        found: dict[int, Path] = {}
        for child in sorted((path / kind).iterdir()):
            if m := _TRAINER.fullmatch(child.name):
                _refuse_pipeline(m[3], child)
                if int(m[1]) and kind == "optim":
                    raise CheckpointError(
                        f"{child}: the optimizer is sharded over data-parallel ranks too (ZeRO-1), which cannot be "
                        f"read; leave it out with --no-optimizer"
                    )
                if not int(m[1]):
                    found[int(m[2])] = child
        if not found:
            raise CheckpointError(f"{path / kind} holds no dp_rank_00_tp_rank_XX_pp_rank_00.pt; copy it again")
        kinds[kind] = {file: load_pickle(file) for file in _ranks(found, path / kind)}
    content = load_pickle(path / "user_content.pt") if (path / "user_content.pt").is_file() else None
    scheduler = load_pickle(path / "scheduler.pt") if (path / "scheduler.pt").is_file() else None
    xser = any(child.name.endswith(".tensors") for child in (path / "model").iterdir())
    form = f"neuronx-distributed, trainer.save_checkpoint, {'xser' if xser else 'plain'}"
    user = content if isinstance(content, dict) else {}
    return _contents(path, form, kinds["model"], kinds.get("optim", {}), scheduler, user)


def _contents(
    path: Path, form: str, models: dict[Path, Any], optimizers: dict[Path, Any], scheduler: Any, user: Mapping[str, Any]
) -> Contents:
    sources = [source_of(file, tensors_of(file, model, what="model")) for file, model in models.items()]
    model, tied = untie(sources, list(models))
    moments: list[Source] = []
    if any(optimizer is not None for optimizer in optimizers.values()):
        if len(optimizers) != len(models):
            raise CheckpointError(f"{path} has the model of {len(models)} ranks and the optimizer of {len(optimizers)}")
        read = {
            file: moments_of(file, value, rank) for rank, (file, value) in zip(model, optimizers.items(), strict=True)
        }
        _same("optimizer step", {file: step for file, (_, step) in read.items()})
        moments = [source for source, _ in read.values()]
    named = _STEP.fullmatch(path.name)
    step = user.get("global_step")
    if step is None and isinstance(scheduler, Mapping):
        step = scheduler.get("last_epoch")
    if step is None and named:
        step = int(named[1])
    return Contents(
        path=path,
        format="nxd",
        form=form,
        step=None if step is None else int(step),
        model=model,
        optimizer=moments,
        tied=tied,
        epoch=int(user.get("epoch") or 0),
        training=training_of(next(iter(optimizers.values()), None), scheduler),
        files=sizes_of([path]),
    )


def _same(what: str, values: Mapping[Path, Any]) -> None:
    first, *others = values.items()
    for file, value in others:
        if value != first[1]:
            raise CheckpointError(
                f"{file} is of {what} {value}, {first[0]} of {first[1]}; put the files of one save together"
            )
