"""Load a checkpoint's tensors into a run's model and optimizer."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from common.errors import CheckpointError
from trainer.checkpoint.format import MASTER, has_master, read_tensors, tensor_file
from trainer.checkpoint.resume_point import ResumePoint
from trainer.parallel.shares import put_piece, put_share, whole_shape, without_padding
from trainer.parallel.tensor import TensorParallel


@torch.no_grad()
def load_into(
    targets: dict[str, Tensor],
    start: ResumePoint,
    kind: str,
    vocab_size: int,
    ranks: TensorParallel,
    elsewhere: Collection[str] = (),
) -> None:
    """Copy this rank's shard of a checkpoint's tensors of `kind` (model or optimizer) into `targets`, by name; other
    workers keep those in `elsewhere`.

    Weights come from the master copy if the checkpoint has one; the optimizer's state excludes it. Raises
    `CheckpointError` naming the first tensor that is missing, unexpected, or of another shape.
    """
    if not targets:  # an optimizer without state
        return
    path, size = start.checkpoint, start.state.tensor_parallel_size
    if size not in (1, ranks.size):
        raise CheckpointError(
            f"{path} is split over {size} tensor-parallel ranks, this run has {ranks.size}; make it fit: "
            f"python -m stages.convert {path} OUT --to native --tensor-parallel-size {ranks.size}"
        )
    rank = 0 if size == 1 else ranks.rank
    file, prefix = path / tensor_file(kind, rank, size), ""
    if kind == "model" and has_master(path / tensor_file("optimizer", rank, size)):
        file, prefix = path / tensor_file("optimizer", rank, size), f"{MASTER}."
    if not file.exists():
        raise CheckpointError(
            f"{path} has no {file.name} (saved with --minimal_ckpt?): the next phase can start from its weights, but "
            f"this one cannot be resumed; train it anew in another --output_dir"
        )
    missing = set(targets)
    masters = f"{MASTER}."
    for stored, tensor in read_tensors(
        file, lambda name: name.startswith(masters) is bool(prefix) and name not in elsewhere
    ):
        name = stored.removeprefix(prefix)
        if name not in targets:
            raise CheckpointError(f"{file} holds {name}, which this run has no place for; is it from another model?")
        target = targets[name]
        whole = whole_shape(name, tuple(target.shape), vocab_size, ranks.size)
        needed = whole if size == 1 else tuple(without_padding(name, target, vocab_size, ranks).shape)
        if tuple(tensor.shape) != needed:
            raise CheckpointError(
                f"{file}: {name} has shape {tuple(tensor.shape)}, this run needs {needed}; is it from another model?"
            )
        if size == 1:
            put_share(target, name, tensor, ranks)
        else:
            put_piece(target, name, tensor)
        missing.discard(name)
    if missing:
        raise CheckpointError(f"{file} lacks {sorted(missing)[0]}; is it from another model?")
