"""Write the `ckpt_<step>.pt` that AWS's tutorial script resumes from (see `tutorial`), tensor by tensor.

`torch.save` needs all tensors in memory. Its file is a zip archive of a pickle and one stored record per tensor, so
this module pickles placeholders and writes the records one by one.
"""

from __future__ import annotations

import io
import itertools
import pickle
import random
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from common.errors import CheckpointError
from common.files import HashingFile, durable_file
from trainer.checkpoint.interop.chunks import Chunk
from trainer.checkpoint.interop.contents import MODEL, OPTIMIZER
from trainer.checkpoint.interop.join import Checkpoint
from trainer.checkpoint.interop.names import MOMENTS, TIED
from trainer.checkpoint.tensor_file import Spec, bytes_of
from trainer.config import TrainConfig
from trainer.data.file_names import TRAINING_SHARDS
from trainer.models.bert import has_weight_decay
from trainer.optim.adamw import BETA1, BETA2, EPSILON
from trainer.optim.schedule import linear_warmup_decay

#: Alignment of records in bytes, so that `torch.load(mmap=True)` finds aligned tensors.
_ALIGNMENT = 64
#: Size of a zip record's fixed header, before its name and extra field.
_HEADER_BYTES = 30

Stream = Callable[[Checkpoint, str], Iterator[Chunk]]


@dataclass(frozen=True)
class ScriptSettings:
    """What the source does not record of the script's optimizer and schedule; the defaults are the trainer's."""

    lr: float = TrainConfig.lr
    warmup_steps: int = TrainConfig.warmup_steps
    max_steps: int = TrainConfig.max_steps
    weight_decay: float = TrainConfig.weight_decay
    #: Directory of the script's shards; None: `files` is empty, and only a phase 2 can start from the file.
    data_dir: Path | None = None


class _Placeholder:
    """Stands in for a tensor in the pickle: the key of its record, and its spec."""

    def __init__(self, key: str, spec: Spec) -> None:
        self.key, self.spec = key, spec


class _Storage:
    def __init__(self, placeholder: _Placeholder) -> None:
        self.placeholder = placeholder


class _Pickler(pickle.Pickler):
    """Pickles placeholders as `torch.save` pickles contiguous CPU tensors."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, _Placeholder):
            return NotImplemented
        shape = obj.spec.shape
        stride = tuple(torch.empty(shape, device="meta").stride())
        return torch._utils._rebuild_tensor_v2, (_Storage(obj), 0, shape, stride, False, OrderedDict())

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Storage):
            return None
        spec = obj.placeholder.spec
        return ("storage", _STORAGES[spec.dtype], obj.placeholder.key, "cpu", spec.numel)


_STORAGES = {
    torch.float32: torch.FloatStorage,
    torch.float64: torch.DoubleStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
}


def write(
    path: Path, source: Checkpoint, kinds: Sequence[str], stream: Stream, step: int, settings: ScriptSettings
) -> dict[str, Any]:
    """Write `path` durably; returns {"path", "bytes", "sha256"}. Raises `CheckpointError`, `DiskError`."""
    if not source.config.next_sentence:
        raise CheckpointError(
            f"{source.contents.path} holds a BertForMaskedLM; the script trains a BertForPreTraining only: use another "
            f"format, --to hf or --to native"
        )
    model = {name: _Placeholder(str(at), spec) for at, (name, spec) in enumerate(source.specs(MODEL).items())}
    moments = {
        name: _Placeholder(f"{len(model) + at}", spec)
        for at, (name, spec) in enumerate(source.specs(OPTIMIZER).items())
    }
    saved: dict[str, Any] = {"model": _state_dict(model)}
    if OPTIMIZER in kinds:
        # The schedule counts the steps of the phase; the bias correction of the moments counts all updates behind them.
        state = source.contents.state
        steps, updates = (step, step) if state is None else (state.step, state.optimizer_steps)
        groups = _groups(source, settings, steps)
        saved |= {
            "optimizer": _optimizer(model, moments, groups, updates),
            "scheduler": _schedule(source, groups, steps),
        }
    saved |= {"files": _files(source, settings), "epoch": source.contents.epoch}
    pickled = io.BytesIO()
    _Pickler(pickled, protocol=2).dump(saved)
    placeholders = {MODEL: model, OPTIMIZER: moments}
    small = {"data.pkl": pickled.getvalue(), "byteorder": b"little", "version": b"3\n"}
    with (
        durable_file(path) as file,
        zipfile.ZipFile(_Sink(file), "w", zipfile.ZIP_STORED) as archive,  # type: ignore[call-overload]
    ):
        for name, content in small.items():
            with _record(archive, f"{path.stem}/{name}", len(content)) as record:
                record.write(content)
        for kind in kinds:
            for name, chunks in itertools.groupby(stream(source, kind), key=lambda chunk: chunk.name):
                placeholder = placeholders[kind][name]
                with _record(archive, f"{path.stem}/data/{placeholder.key}", placeholder.spec.bytes) as record:
                    for chunk in chunks:
                        record.write(bytes_of(chunk.rows))
    return {"path": path.name, "bytes": file.bytes, "sha256": file.sha256}


class _Sink:
    """File-like object without seek, for `zipfile`."""

    def __init__(self, file: HashingFile) -> None:
        self._file = file

    def write(self, data: bytes | memoryview) -> int:
        self._file.write(data)
        return len(data)

    def flush(self) -> None:
        pass


def _record(archive: zipfile.ZipFile, name: str, size: int) -> IO[bytes]:
    """Open a record of `size` bytes for writing, at an aligned offset."""
    info = zipfile.ZipInfo(name)
    info.file_size = size
    unpadded = archive.start_dir + _HEADER_BYTES + len(name) + 4
    padding = -unpadded % _ALIGNMENT
    info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    return archive.open(info, "w")


def _state_dict(model: dict[str, _Placeholder]) -> dict[str, _Placeholder]:
    """The state_dict in Hugging Face's order: the tied decoder follows the head's transform."""
    ordered: dict[str, _Placeholder] = {}
    for name, placeholder in model.items():
        if name.startswith("cls.seq_relationship."):
            ordered |= {alias: model[ours] for alias, ours in TIED.items()}
        ordered[name] = placeholder
    return ordered


def _optimizer(
    model: dict[str, _Placeholder], moments: dict[str, _Placeholder], groups: list[dict[str, Any]], updates: int
) -> dict[str, Any]:
    unknown = next((name for name in moments if name.split(".", 1)[0] not in MOMENTS), None)
    if unknown:
        raise CheckpointError(f"the script's AdamW has no place for {unknown}; leave the optimizer out: --no-optimizer")
    parts = [[n for n in model if has_weight_decay(n)], [n for n in model if not has_weight_decay(n)]]
    numbers = {name: number for number, name in enumerate([*parts[0], *parts[1]])}
    state = {n: {"step": updates, **{m: moments[f"{m}.{name}"] for m in MOMENTS}} for name, n in numbers.items()}
    numbered = [{**group, "params": [numbers[n] for n in part]} for group, part in zip(groups, parts, strict=True)]
    return {"state": state, "param_groups": numbered}


def _groups(source: Checkpoint, settings: ScriptSettings, steps: int) -> list[dict[str, Any]]:
    """Options of the groups with and without weight decay; the source's if it has two groups."""
    found = source.contents.training.get("param_groups", [])
    rate = linear_warmup_decay(
        steps, peak=settings.lr, warmup_steps=settings.warmup_steps, max_steps=settings.max_steps
    )
    ours = {"lr": rate, "betas": list((BETA1, BETA2)), "eps": EPSILON, "correct_bias": True, "initial_lr": settings.lr}
    groups = (
        found if len(found) == 2 else [{"weight_decay": settings.weight_decay, **ours}, {"weight_decay": 0.0, **ours}]
    )
    return [{**ours, **group} for group in groups]


def _schedule(source: Checkpoint, groups: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """The state of get_linear_schedule_with_warmup; the source's takes precedence."""
    ours = {
        "base_lrs": [group["initial_lr"] for group in groups],
        "last_epoch": steps,
        "_step_count": steps + 1,
        "_is_initial": False,
        "_get_lr_called_within_step": False,
        "_last_lr": [group["lr"] for group in groups],
        "lr_lambdas": [{}, {}],
    }
    return {**ours, **source.contents.training.get("scheduler", {})}


def _files(source: Checkpoint, settings: ScriptSettings) -> list[Any]:
    """[index of the next shard, *shards in the script's order for this epoch]."""
    if settings.data_dir is None:
        return list(source.contents.training.get("files", [0]))
    found = sorted(str(path) for path in settings.data_dir.glob(TRAINING_SHARDS))
    if not found:
        raise CheckpointError(
            f"{settings.data_dir} holds no {TRAINING_SHARDS}; give the directory of the script's shards"
        )
    random.Random(source.contents.epoch).shuffle(found)
    return [0, *found]
