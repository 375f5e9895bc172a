"""Code shared by stages.convert and stages.merge: the source checkpoint, its identity, disk space, and writing."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar
from urllib.parse import urlsplit

from common.addresses import local_path, url_scheme
from common.disk_space import require_disk_space
from common.errors import CheckpointError, UserError
from common.files import disk_errors, read_json
from common.hashing import InputFile, InputHashes, changed
from common.options import option
from common.secrets import Secret
from stages.directory.manifest import Output, StageDirectory
from stages.directory.options import StageOptions, fingerprints
from stages.directory.records import read_manifest
from stages.transfer.partial import STATE, State
from stages.transfer.urls import Transport, open_source
from stages.transfer.urls import source_identity as url_identity
from trainer.models.config import ModelConfig

#: Folder in the stage directory for a remote source until it is converted.
DOWNLOAD = "download"
_REMOTE = ("s3", "http", "https")


@dataclass(frozen=True, kw_only=True)
class SourceOptions(StageOptions):
    """The checkpoint that a stage reads, and facts that its files may lack."""

    out_is_positional: ClassVar = True

    source: Secret = option(
        names=("source",),
        metavar="IN",
        help="a checkpoint in any format that stages.convert reads, or the directory of a stage that has made one",
    )
    config: Path | None = option(None, help="config.json of the model, for files that do not describe the model")
    step: int | None = option(None, omit_default=True, help="global step, for files that do not state it")

    def parameters(self) -> dict[str, Any]:
        config = model_config(self.config)
        return {**super().parameters(), **({} if config is None else {"model": config.to_dict()})}

    def upstream(self) -> dict[str, str]:
        return {} if is_remote(self.source) else fingerprints(pretrain=local_source(self.source))


def is_remote(source: Secret) -> bool:
    """Raises `UserError` for what is not an address."""
    return url_scheme(source) in _REMOTE


@contextmanager
def brought(source: Secret, work: StageDirectory, transport: Transport) -> Iterator[Path]:
    """The checkpoint at `source` as a local path; a remote one is downloaded, and removed if the block succeeds.

    Raises `UserError`, including when a local checkpoint has changed since it was identified.
    """
    if not is_remote(source):
        path = checkpoint_of(source)
        with held_still(path, work):
            yield path
        return
    from stages.transfer.fetch import fetch

    remote = open_source(source, transport)
    assert not isinstance(remote, Path)
    folder = work.path / DOWNLOAD
    name = PurePosixPath(urlsplit(source).path).name  # the step is read from it
    path = folder / (name if name not in ("", "..") else "checkpoint")
    with disk_errors(folder):
        folder.mkdir(exist_ok=True)
    version = fetch(
        remote, work, path, connections=transport.connections, least_rate=transport.least_rate, sha256=None,
        begin=lambda version, missing, is_same: require_disk_space(work.path, missing, f"{source} needs"),
    )  # fmt: skip
    try:
        yield path
    except CheckpointError:  # the next run looks whether the server has another one by now
        State(remote.url, version, [(0, version.length)], refused=True).write(work.path)
        raise
    with disk_errors(work.path):
        shutil.rmtree(folder)
        (work.path / STATE).unlink(missing_ok=True)


def local_source(source: Secret) -> Path:
    """The path of a local checkpoint. Raises `UserError`, if it is remote or missing a `CheckpointError`."""
    if is_remote(source):
        raise CheckpointError(f"{source} is not on this machine; fetch it with stages.convert, or download it first")
    return _existing(local_path(source))


def _existing(path: Path) -> Path:
    if not path.exists():
        raise CheckpointError(f"there is no checkpoint {path}; check the path")
    return path


def checkpoint_of(source: Secret) -> Path:
    """`checkpoint_in` for a local source. Raises `CheckpointError` if it is remote or there is none."""
    return checkpoint_in(local_source(source))


def checkpoint_in(path: Path) -> Path:
    """`path`; if it is the directory of a complete stage, the checkpoint that the stage made.

    Raises `CheckpointError` if there is none.
    """
    if not fingerprints(stage=_existing(path)):
        return path
    counts = (read_manifest(path) or {})["counts"]
    made = [counts["checkpoint"]] if "checkpoint" in counts else ["checkpoint", "model"]
    for name in made:
        if (path / name).exists():
            return path / name
    raise CheckpointError(f"the stage in {path} has made no checkpoint; give a training stage's directory, or a file")


@contextmanager
def held_still(path: Path, work: StageDirectory) -> Iterator[None]:
    """Raise `UserError` if the checkpoint, before or after the block, differs from the one `work` was claimed with."""
    inputs = work.identity.inputs
    expected = inputs.get("checkpoint", inputs.get("start_from"))
    if expected is None:  # made by the upstream stage, whose fingerprint identifies it
        yield
        return
    files = InputHashes.beside(work.path).hash(checkpoint_files(path))
    if _identity(path, files) != expected:
        raise changed(path)
    yield
    for file in files:
        file.require_unchanged()


def source_identity(source: Secret, hashes: InputHashes) -> str | dict[str, str]:
    """Identity of a checkpoint: the address of a remote one, else the sha256 of its files by name.

    Raises `UserError`.
    """
    if is_remote(source):
        return url_identity(source, hashes)
    path = local_source(source)
    return _identity(path, hashes.hash(checkpoint_files(path)))


def _identity(path: Path, files: list[InputFile]) -> dict[str, str]:
    # A single file's name contains the step.
    return {os.path.relpath(file.path, path) if path.is_dir() else path.name: file.sha256 for file in files}


def checkpoint_files(path: Path) -> list[Path]:
    """All files of the checkpoint at `path`."""
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def model_config(path: Path | None) -> ModelConfig | None:
    """Read the model from a config.json; None without a path. Raises `UserError`."""
    if path is None:
        return None
    config = read_json(path)
    if config is None:
        raise UserError(f"--config {path} is not a file with a JSON object; give a Hugging Face config.json")
    return ModelConfig.of_hugging_face(config)


@contextmanager
def opened(path: Path, config: ModelConfig | None, *, optimizer: bool) -> Iterator[Any]:
    """Open the checkpoint at `path` as a `join.Checkpoint`, which checks that its shards fit together.

    Raises `CheckpointError`.
    """
    import torch

    from trainer.checkpoint.interop import open_checkpoint
    from trainer.checkpoint.interop.join import Checkpoint

    # Threads already work on separate chunks; torch's own threads would only spin waiting (docs/decisions.md).
    torch.set_num_threads(1)
    contents = open_checkpoint(path, optimizer=optimizer)
    try:
        yield Checkpoint(contents, config)
    finally:
        contents.close()


def written(
    work: StageDirectory, source: Any, directory: Path, to: str, options: Any
) -> tuple[list[Output], dict[str, Any]]:
    """Write `source` in the format `to` into `directory`, with a progress bar; returns the outputs and the counts."""
    from trainer.checkpoint.interop.contents import MODEL
    from trainer.checkpoint.interop.write import WRITERS, state_of

    kinds = options.kinds(source)
    total = sum(spec.bytes for kind in kinds for spec in source.specs(kind).values())
    with work.progress("convert", total, "B") as bar:
        entries = WRITERS[to](directory, source, dataclasses.replace(options, advance=bar.update))
    state = state_of(source, options)
    counts = {
        "phase": state.phase,
        "global_step": state.global_step,
        "parameters": sum(spec.numel for spec in source.specs(MODEL).values()),
        "with_optimizer": len(kinds) > 1,
        "format": source.contents.form,
    }
    return [Output(entry["path"], entry["bytes"], entry["sha256"]) for entry in entries], counts
