"""Summarize a checkpoint from its headers, for `python -m stages.convert --inspect IN`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from common.errors import CheckpointError
from trainer.checkpoint.interop import open_checkpoint
from trainer.checkpoint.interop.contents import Contents
from trainer.checkpoint.interop.infer import infer_model
from trainer.checkpoint.interop.sources import Source


def inspect(path: Path) -> str:
    """Describe the checkpoint at `path` (format, step, model, sizes, dtypes, parallel degrees) without loading tensors.

    Raises `CheckpointError` if it is damaged or of an unknown format.
    """
    contents = open_checkpoint(path)
    try:
        size = sum(contents.files.values())
        lines = {
            "format": f"{contents.format}: {contents.form}",
            "step": "unknown" if contents.step is None else f"{contents.step:,}",
            "model": _model(contents),
            "parameters": _tensors(contents.model),
            "optimizer": _tensors(contents.optimizer) if contents.optimizer else "none",
            "degrees": f"tensor parallel {contents.tensor_parallel_size}, pipeline parallel 1",
            "files": f"{len(contents.files):,}, {size / 1e6:,.1f} MB",
        }
    finally:
        contents.close()
    return "\n".join([str(contents.path), *(f"  {name + ':':<12}{value}" for name, value in lines.items())])


def _model(contents: Contents) -> str:
    try:
        model = contents.config or infer_model(contents)
    except CheckpointError as error:
        return f"unknown ({str(error).split('; ')[-1]})"
    return (
        f"{model.num_hidden_layers} layers, hidden size {model.hidden_size}, {model.num_attention_heads} heads, "
        f"intermediate size {model.intermediate_size}, vocabulary {model.vocab_size:,}"
        f"{'' if contents.config else ' (from its shapes)'}"
    )


def _tensors(ranks: Sequence[Source]) -> str:
    """Tensors per rank, and values, bytes and dtypes over all ranks."""
    specs = [spec for source in ranks for spec in source.specs.values()]
    types = Counter(str(spec.dtype).removeprefix("torch.") for spec in specs)
    each = f" on each of {len(ranks)} ranks" if len(ranks) > 1 else ""
    return (
        f"{len(ranks[0].specs)} tensors{each}, {sum(spec.numel for spec in specs):,} values, "
        f"{sum(spec.bytes for spec in specs) / 1e6:,.1f} MB, {' and '.join(sorted(types))}"
    )
