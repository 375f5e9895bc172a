"""Write whole tensors as a checkpoint, one tensor at a time, in each output format (`WRITERS`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import CheckpointError
from common.files import sha256_of, write_json
from trainer.checkpoint.format import tensor_file, write_manifest
from trainer.checkpoint.interop import pt_file
from trainer.checkpoint.interop.chunks import Chunk
from trainer.checkpoint.interop.contents import KINDS, MODEL, OPTIMIZER
from trainer.checkpoint.interop.hugging_face import CONFIG, OPTIMIZER_FILE
from trainer.checkpoint.interop.join import Checkpoint, require_finite
from trainer.checkpoint.tensor_file import Spec, tensor_writer
from trainer.data.order import ORDER_VERSION
from trainer.parallel.plan import share, split_of, stored_shape
from trainer.state import TrainState

#: {"path", "bytes", "sha256"} of each file written.
Entries = list[dict[str, Any]]


@dataclass(frozen=True)
class WriteOptions:
    """Options of the writers; each format uses those that apply to it."""

    #: Global step; None: the source's.
    step: int | None = None
    with_optimizer: bool = True
    #: native: number of tensor-parallel ranks.
    tensor_parallel_size: int = 1
    #: hf: dtype of the parameters; None: unchanged. Moments keep theirs.
    dtype: torch.dtype | None = None
    #: hf: maximum file size, exceeded only by a single larger tensor; None: one file.
    max_shard_bytes: int | None = None
    #: pt: settings of the script's optimizer and schedule that the source does not record.
    training: pt_file.ScriptSettings = dataclasses.field(default_factory=pt_file.ScriptSettings)
    #: Called with the number of bytes of each chunk written.
    advance: Callable[[int], None] = lambda size: None

    def kinds(self, source: Checkpoint) -> tuple[str, ...]:
        return KINDS if self.with_optimizer and source.with_optimizer else (MODEL,)

    def stream(self, source: Checkpoint, kind: str) -> Iterator[Chunk]:
        for chunk in source.stream(kind):
            yield chunk
            self.advance(chunk.rows.nbytes)


def stated_step(source: Checkpoint, options: WriteOptions) -> int | None:
    """The global step of the options, else of the source. Raises `CheckpointError` if the source, a checkpoint of this
    project, has another; other formats' files may not know it."""
    stated, given = source.contents.step, options.step
    if source.contents.state is not None and given not in (None, stated):
        raise CheckpointError(f"{source.contents.path} is of step {stated}, not {given}; leave --step out")
    return stated if given is None else given


def step_of(source: Checkpoint, options: WriteOptions) -> int:
    """The global step; 0 if neither the options nor the source give one. Raises `CheckpointError`."""
    return stated_step(source, options) or 0


def state_of(source: Checkpoint, options: WriteOptions) -> TrainState:
    """The state to record. Another tool's checkpoint lacks most of it, so only the next phase can start from it."""
    step, size = step_of(source, options), options.tensor_parallel_size
    if source.contents.state is not None:
        return dataclasses.replace(source.contents.state, tensor_parallel_size=size)
    return TrainState(
        phase=1,
        step=step,
        global_step=step,
        samples_consumed=0,
        epoch=source.contents.epoch,
        seed=0,
        global_batch_size=0,
        data=f"not known: from {source.contents.form}",
        order_version=ORDER_VERSION,
        optimizer="AdamW",
        precision="not known",
        model=source.config.to_dict(),
        data_parallel_size=1,
        tensor_parallel_size=size,
        micro_batch_size=0,
        torch_version=torch.__version__,
    )


def write_native(directory: Path, source: Checkpoint, options: WriteOptions) -> Entries:
    """Write a native checkpoint for `tensor_parallel_size` ranks into the empty `directory`."""
    size, state = options.tensor_parallel_size, state_of(source, options)
    source.config.require_divisible(size)
    metadata = {"format": "pt", "step": str(state.global_step)}
    entries: Entries = []
    for kind in options.kinds(source):
        specs = source.specs(kind)
        with ExitStack() as stack:
            writers = []
            for rank in range(size):
                shares = {
                    n: Spec(s.dtype, stored_shape(_plain(n, kind), s.shape, rank, size)) for n, s in specs.items()
                }
                path = directory / tensor_file(kind, rank, size)
                writers.append(stack.enter_context(tensor_writer(path, shares, metadata)))
            for chunk in options.stream(source, kind):
                length = specs[chunk.name].shape[0]
                for rank, writer in enumerate(writers):
                    writer.put(chunk.name, _piece(_plain(chunk.name, kind), chunk, length, rank, size))
        entries += [writer.entry for writer in writers]
    return write_manifest(directory, state.global_step, state.to_json(), entries)


def _plain(name: str, kind: str) -> str:
    """The name of the parameter that a tensor is, or is a moment of."""
    return name if kind == MODEL else name.split(".", 1)[1]


def _piece(parameter: str, chunk: Chunk, length: int, rank: int, size: int) -> Tensor:
    """The part of a chunk that rank `rank` of `size` holds; `length`: the parameter's rows."""
    split = split_of(parameter)
    if split is None or size == 1:
        return chunk.rows
    if split.axis == 1:
        return chunk.rows[:, share(chunk.rows.shape[1], rank, size)]
    place, rows = share(length, rank, size), len(chunk.rows)
    start, stop = (min(max(row - chunk.row, 0), rows) for row in (place.start, place.stop))
    return chunk.rows[start:stop]


def write_hugging_face(directory: Path, source: Checkpoint, options: WriteOptions) -> Entries:
    """Write config.json, model.safetensors or shards with an index, and optimizer.safetensors if requested."""
    metadata = {"format": "pt", "step": str(step_of(source, options))}
    specs = {name: Spec(options.dtype or s.dtype, s.shape) for name, s in source.specs(MODEL).items()}
    files = _shards(specs, options.max_shard_bytes)
    config = source.config.to_hugging_face()
    if any(spec.dtype != torch.float32 for spec in specs.values()):
        config["torch_dtype"] = str(next(iter(specs.values())).dtype).removeprefix("torch.")
    write_json(directory / CONFIG, config)
    entries: Entries = []
    chunks = options.stream(source, MODEL)
    chunk = next(chunks, None)
    for file, names in files.items():
        with tensor_writer(directory / file, {n: specs[n] for n in names}, metadata) as writer:
            while chunk is not None and chunk.name in names:
                writer.put(chunk.name, _converted(source, chunk, options.dtype))
                chunk = next(chunks, None)
        entries.append(writer.entry)
    if OPTIMIZER in options.kinds(source):
        moments = source.specs(OPTIMIZER)
        with tensor_writer(directory / OPTIMIZER_FILE, moments, metadata) as writer:
            for chunk in options.stream(source, OPTIMIZER):
                writer.put(chunk.name, chunk.rows)
        entries.append(writer.entry)
    small = [CONFIG]
    if len(files) > 1:
        places = {name: file for file, names in files.items() for name in names}
        total = sum(spec.bytes for spec in specs.values())
        write_json(
            directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": places}
        )
        small.append("model.safetensors.index.json")
    return [*entries, *(entry_of(directory / name) for name in small)]


def _converted(source: Checkpoint, chunk: Chunk, dtype: torch.dtype | None) -> Tensor:
    if dtype is None or chunk.rows.dtype == dtype:
        return chunk.rows
    converted = chunk.rows.to(dtype)
    require_finite(f"{source.contents.path}: {chunk.name} as {dtype}", converted)
    return converted


def _shards(specs: Mapping[str, Spec], most_bytes: int | None) -> dict[str, list[str]]:
    """File → its tensors, in order, filling each file up to `most_bytes`."""
    groups: list[list[str]] = [[]]
    held = 0
    for name, spec in specs.items():
        if most_bytes is not None and groups[-1] and held + spec.bytes > most_bytes:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += spec.bytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{at:05}-of-{len(groups):05}.safetensors": names for at, names in enumerate(groups, start=1)}


def write_script(directory: Path, source: Checkpoint, options: WriteOptions) -> Entries:
    """Write `ckpt_<step>.pt`, from which the tutorial's script resumes, into `directory`."""
    step = stated_step(source, options)
    if step is None:
        raise CheckpointError(
            f"{source.contents.path} does not say its step, needed to name a ckpt_<step>.pt; give --step"
        )
    path = directory / f"ckpt_{step}.pt"
    return [pt_file.write(path, source, options.kinds(source), options.stream, step, options.training)]


def entry_of(path: Path) -> dict[str, Any]:
    """{"path", "bytes", "sha256"} of a finished, small file."""
    return {"path": path.name, "bytes": path.stat().st_size, "sha256": sha256_of(path)}


def bytes_needed(source: Checkpoint, options: WriteOptions) -> int:
    """Estimated output size in bytes: the tensors, plus 1 MiB for other files."""
    total = 1 << 20
    for kind in options.kinds(source):
        for spec in source.specs(kind).values():
            dtype = options.dtype if kind == MODEL and options.dtype else spec.dtype
            total += spec.numel * dtype.itemsize
    return total


#: Format → its writer, which raises `CheckpointError`, `DiskError`, `UserError`.
WRITERS: dict[str, Callable[[Path, Checkpoint, WriteOptions], Entries]] = {
    "native": write_native,
    "hf": write_hugging_face,
    "pt": write_script,
}
