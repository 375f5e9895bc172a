"""Initial word embeddings and an output bias that were made from the text."""

from __future__ import annotations

import math
from pathlib import Path

import safetensors
import safetensors.torch
from torch import Tensor
from torch.nn import functional as F

from common.errors import UserError
from trainer.models.bert import OUTPUT_BIAS, WORD_EMBEDDINGS
from trainer.models.config import ModelConfig


def word_embeddings(path: Path, model: ModelConfig) -> dict[str, Tensor]:
    """The tensors of a file made by stages.embed. Raises `UserError` unless they fit the model.

    Words without counts get NaN, for BERT's values. Ids above those in the file are taken to be as rare as its rarest:
    a bias of 0 would give each a probability of 1.
    """
    limits = {WORD_EMBEDDINGS: (model.vocab_size, model.hidden_size), OUTPUT_BIAS: (model.vocab_size,)}
    try:
        found = {name: tensor.float() for name, tensor in safetensors.torch.load(path.read_bytes()).items()}
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"--word_embeddings {path}: {error}; give the file that stages.embed makes") from error
    shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
    for name, (most, *rest) in limits.items():
        shape = shapes.get(name, ())
        if len(shape) != len(rest) + 1 or not 0 < shape[0] <= most or list(shape[1:]) != rest:
            raise UserError(
                f"--word_embeddings {path}: {name} is {list(shape) if name in found else 'missing'}; allowed: up to "
                f"{[most, *rest]}, as stages.embed makes them for this model and vocabulary"
            )
        if not found[name].isfinite().all():
            raise UserError(f"--word_embeddings {path}: {name} has values that are not finite; make the file again")
    bias = found[OUTPUT_BIAS]
    whole = F.pad(bias, (0, model.vocab_size - len(bias)), value=float(bias.min()))
    vectors = found[WORD_EMBEDDINGS]
    is_known = vectors.any(dim=1, keepdim=True)
    return {WORD_EMBEDDINGS: vectors.where(is_known, math.nan), OUTPUT_BIAS: whole}
