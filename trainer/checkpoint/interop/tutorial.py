"""`ckpt_<step>.pt` of AWS's tutorial script `dp_bert_large_hf_pretrain_hdf5.py`; NVIDIA's are similar.

    model      the state_dict, with the tied decoder duplicated
    optimizer  AdamW's: state by number (step, exp_avg, exp_avg_sq), param_groups; absent from a minimal checkpoint
    scheduler  get_linear_schedule_with_warmup's
    files      [index of the next shard, path, path, …]
    epoch

Only the file's name holds the global step.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch import Tensor

from common.errors import CheckpointError
from trainer.checkpoint.interop.contents import Contents
from trainer.checkpoint.interop.foreign import moments_of, sizes_of, training_of, untie
from trainer.checkpoint.interop.sources import Source, load_pickle, source_of, tensors_of

_NAME = re.compile(r"ckpt_(\d+)\.pt")


def recognise(path: Path) -> bool:
    return path.is_file()


def read(path: Path, *, optimizer: bool) -> Contents:
    """Raises `CheckpointError` for a damaged or truncated file, types other than tensors and plain containers, or a
    missing model."""
    loaded: Any = load_pickle(path)
    if isinstance(loaded, dict) and loaded and all(isinstance(value, Tensor) for value in loaded.values()):
        loaded, form = {"model": loaded}, "a bare state_dict"
    elif isinstance(loaded, dict) and "model" in loaded:
        form = "checkpoint of the tutorial's script"
    else:
        keys = ", ".join(map(str, list(loaded)[:5])) if isinstance(loaded, dict) else type(loaded).__name__
        raise CheckpointError(f"{path} holds no model: its keys are {keys}; a ckpt_<step>.pt has 'model' among them")
    model, tied = untie([source_of(path, tensors_of(path, loaded["model"], what="model"))], [path])
    moments: list[Source] = []
    if optimizer and loaded.get("optimizer") is not None:
        moments = [moments_of(path, loaded["optimizer"], model[0])[0]]
    named = _NAME.fullmatch(path.name)
    return Contents(
        path=path,
        format="pt",
        form=form,
        step=int(named[1]) if named else None,
        model=model,
        optimizer=moments,
        tied=tied,
        epoch=int(loaded.get("epoch") or 0),
        training=training_of(loaded.get("optimizer"), loaded.get("scheduler"), loaded.get("files")),
        files=sizes_of([path]),
    )
