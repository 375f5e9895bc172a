"""What a shared store has that the work directory lacks, in the form of stage directories."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.console import log
from common.files import parse_utc
from pipeline.status.stage_dirs import StageDir

if TYPE_CHECKING:
    from stages.store.backend import Backend
    from stages.store.maintenance import Contents, StoredStage, StoredTraining


@dataclass(frozen=True)
class StoredDir(StageDir):
    """A stage in a store. `path`: the name that its directory would have. `record`: its manifest, or what the state of
    the newest checkpoint says."""

    bytes: int
    #: Optimizer steps of a training that is not complete; None of a complete stage.
    steps: int | None = None

    @property
    def is_complete(self) -> bool:
        return self.steps is None


def stored_dirs(backend: Backend, contents: Contents, here: Collection[str]) -> Iterator[StoredDir]:
    """The complete stages, and the trainings with a checkpoint, whose fingerprints are not among `here`. Damaged ones
    are noted in the log. Raises `UserError`."""
    stages = [stage for stage in contents.stages if stage.record.fingerprint not in here]
    complete = {stage.record.fingerprint for stage in contents.stages}
    trainings = [
        one for one in contents.trainings if one.lease.checkpoints and one.fingerprint not in {*here, *complete}
    ]
    with ThreadPoolExecutor(backend.connections) as threads:
        found = [
            *threads.map(lambda stage: _complete(backend, stage), stages),
            *threads.map(lambda training: _unfinished(backend, training), trainings),
        ]
    damaged = len(contents.damaged) + found.count(None)
    if damaged:
        records = f"{damaged} damaged record{'s' if damaged > 1 else ''}"
        log(f"note: {backend.url} has {records}; see python -m pipeline store verify --read")
    return (one for one in found if one is not None)


def _complete(backend: Backend, stage: StoredStage) -> StoredDir | None:
    from stages.store.complete import stored_manifest

    manifest = stored_manifest(backend, stage.record)
    if manifest is None:
        return None
    ended = parse_utc(manifest["started"]).timestamp() + manifest["seconds"]
    return StoredDir(Path(stage.name), stage.record.label, manifest, ended, stage.record.total_bytes)


def _unfinished(backend: Backend, training: StoredTraining) -> StoredDir | None:
    from stages.store.checkpoints import stored_state
    from stages.store.records import full_name

    newest = training.lease.checkpoints[-1]
    state = stored_state(backend, full_name(training.label, training.fingerprint), newest)
    if state is None:
        return None
    kept = ("seed", "global_batch_size", "optimizer", "precision")
    parameters: dict[str, Any] = {**state["settings"], **{name: state[name] for name in kept}}
    record = {"fingerprint": training.fingerprint, "parameters": parameters}
    size = sum(file.bytes for file in training.files().values())
    return StoredDir(Path(training.name), training.label, record, training.written, size, steps=state["step"])
