"""Infer the model of a checkpoint without a config from its shapes, if they are a published model's."""

from __future__ import annotations

import re
from collections.abc import Iterator

from common.errors import CheckpointError
from trainer.checkpoint.interop.contents import Contents
from trainer.models.config import PRESETS, ModelConfig

_LAYER = re.compile(r"bert\.encoder\.layer\.(\d+)\.")


def infer_model(contents: Contents) -> ModelConfig:
    """The published model with the checkpoint's shapes.

    Raises `CheckpointError` for any other: shapes do not reveal the number of attention heads.
    """
    shapes = {name: spec.shape for name, spec in contents.model[0].specs.items()}
    needed = ("bert.embeddings.LayerNorm.weight", "bert.embeddings.position_embeddings.weight",
              "bert.embeddings.token_type_embeddings.weight", "bert.embeddings.word_embeddings.weight",
              "bert.encoder.layer.0.intermediate.dense.weight", "cls.predictions.bias")  # fmt: skip
    for name in needed:
        if name not in shapes:
            raise CheckpointError(f"{contents.path} lacks {name}; it is not a complete BERT for pretraining")
    layers = 1 + max(int(m[1]) for name in shapes if (m := _LAYER.match(name)))
    (hidden,) = shapes["bert.embeddings.LayerNorm.weight"]
    rows = shapes["bert.encoder.layer.0.intermediate.dense.weight"][0]
    sizes = {rows, rows * contents.tensor_parallel_size}
    for preset_layers, preset_hidden, heads, intermediate in PRESETS.values():
        if (preset_layers, preset_hidden) == (layers, hidden) and intermediate in sizes:
            return ModelConfig(
                # Most tools do not split this bias; if it is split, the vocabulary will not match and is refused.
                vocab_size=shapes["cls.predictions.bias"][0],
                num_hidden_layers=layers,
                hidden_size=hidden,
                num_attention_heads=heads,
                intermediate_size=intermediate,
                max_position_embeddings=shapes["bert.embeddings.position_embeddings.weight"][0],
                type_vocab_size=shapes["bert.embeddings.token_type_embeddings.weight"][0],
            )
    raise CheckpointError(
        f"{contents.path}: {layers} layers of hidden size {hidden} with bert.encoder.layer.0.intermediate.dense.weight "
        f"of {rows} rows{_on_ranks(contents)} match no published model, and no file says its num_attention_heads; give "
        f"--config config.json"
    )


def _on_ranks(contents: Contents) -> str:
    return f" on each of {contents.tensor_parallel_size} ranks" if contents.tensor_parallel_size > 1 else ""


def conflicts(given: ModelConfig, found: ModelConfig) -> Iterator[str]:
    """Yield the differences between two models that make their parameters incompatible."""
    for name in ("vocab_size", "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size",
                 "max_position_embeddings", "type_vocab_size"):  # fmt: skip
        mine, theirs = getattr(given, name), getattr(found, name)
        if mine != theirs:
            yield f"{name} is {theirs}, not {mine}"
