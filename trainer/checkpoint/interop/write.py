"""Whole tensors → a checkpoint, one tensor at a time, in each format that is written (`WRITERS`)."""

from __future__ import annotations

import dataclasses
import importlib
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
from trainer.parallel.plan import require_divisible, share, split_of, stored_shape
from trainer.state import TrainState

#: {"path", "bytes", "sha256"} of each file written.
Entries = list[dict[str, Any]]


@dataclass(frozen=True)
class WriteOptions:
    """How a checkpoint is written; each format reads what it knows."""

    #: Global step; None: what the source says.
    step: int | None = None
    with_optimizer: bool = True
    #: native: files for so many tensor-parallel ranks.
    tensor_parallel_size: int = 1
    #: hf: type of the parameters; None: as they are. Moments keep theirs.
    dtype: torch.dtype | None = None
    #: hf: largest file, unless a single tensor is larger; None: one file.
    max_shard_bytes: int | None = None
    #: pt: what the script's optimizer and schedule go on with, where the source does not say it.
    training: pt_file.ScriptSettings = dataclasses.field(default_factory=pt_file.ScriptSettings)
    #: Told how many bytes more were written.
    advance: Callable[[int], None] = lambda size: None

    def kinds(self, source: Checkpoint) -> tuple[str, ...]:
        return KINDS if self.with_optimizer and source.with_optimizer else (MODEL,)

    def stream(self, source: Checkpoint, kind: str) -> Iterator[Chunk]:
        for chunk in source.stream(kind):
            yield chunk
            self.advance(chunk.rows.nbytes)


def step_of(source: Checkpoint, options: WriteOptions) -> int:
    """The global step; 0 for weights whose files do not say one."""
    step = options.step if options.step is not None else source.contents.step
    return 0 if step is None else step


def state_of(source: Checkpoint, options: WriteOptions) -> TrainState:
    """The state to record. Of another tool's checkpoint little is known, so nothing but a next phase starts from it."""
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
        model=dataclasses.asdict(source.config),
        data_parallel_size=1,
        tensor_parallel_size=size,
        micro_batch_size=0,
        torch_version=torch.__version__,
    )


def write_native(directory: Path, source: Checkpoint, options: WriteOptions) -> Entries:
    """Our own checkpoint, split for `tensor_parallel_size` ranks, into the empty `directory`."""
    size, state = options.tensor_parallel_size, state_of(source, options)
    require_divisible(source.config, size)
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
    """The parameter that a tensor is, or is a moment of."""
    return name if kind == MODEL else name.split(".", 1)[1]


def _piece(parameter: str, chunk: Chunk, length: int, rank: int, size: int) -> Tensor:
    """Of some rows of a parameter that has `length`, what rank `rank` of `size` holds."""
    split = split_of(parameter)
    if split is None or size == 1:
        return chunk.rows
    if split.axis == 1:
        return chunk.rows[:, share(chunk.rows.shape[1], rank, size)]
    place, rows = share(length, rank, size), len(chunk.rows)
    start, stop = (min(max(row - chunk.row, 0), rows) for row in (place.start, place.stop))
    return chunk.rows[start:stop]


def write_hugging_face(directory: Path, source: Checkpoint, options: WriteOptions) -> Entries:
    """config.json, model.safetensors or shards with their index, and optimizer.safetensors if it is wanted."""
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
    """File → the tensors in it, each file as many in order as fit `most_bytes`."""
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
    """`ckpt_<step>.pt`, from which the tutorial's script resumes; in `directory`."""
    step = options.step if options.step is not None else source.contents.step
    if step is None:
        raise CheckpointError(
            f"{source.contents.path} does not say its step, which names a ckpt_<step>.pt; give --step"
        )
    path = directory / f"ckpt_{step}.pt"
    return [pt_file.write(path, source, options.kinds(source), options.stream, step, options.training)]


def entry_of(path: Path) -> dict[str, Any]:
    """{"path", "bytes", "sha256"} of a finished, small file."""
    return {"path": path.name, "bytes": path.stat().st_size, "sha256": sha256_of(path)}


def bytes_needed(source: Checkpoint, options: WriteOptions) -> int:
    """About how much will be written: the tensors, and a megabyte for the rest."""
    total = 1 << 20
    for kind in options.kinds(source):
        for spec in source.specs(kind).values():
            dtype = options.dtype if kind == MODEL and options.dtype else spec.dtype
            total += spec.numel * dtype.itemsize
    return total


def meets_hugging_face(directory: Path) -> None:
    """Load a finished directory once with Hugging Face, on the meta device; `CheckpointError` if it complains."""
    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = transformers.BertForPreTraining
    _, report = model.from_pretrained(directory, device_map="meta", output_loading_info=True)
    for what, names in report.items():
        if names:
            raise CheckpointError(f"{directory}: Hugging Face reports {what.replace('_', ' ')}: {sorted(names)[0]}")


#: Format → what writes it into a directory; raises `CheckpointError`, `DiskError`, `UserError`.
WRITERS: dict[str, Callable[[Path, Checkpoint, WriteOptions], Entries]] = {
    "native": write_native,
    "hf": write_hugging_face,
    "pt": write_script,
}
