"""Publish a model's files at an address, whole or not at all: the Hugging Face Hub, S3 or a folder.

An earlier publication there is replaced: files of a model that the new one does not have are removed, and files of
other kinds stay, or are a reason to refuse.
"""

from __future__ import annotations

import fcntl
import fnmatch
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from common.addresses import local_path, url_scheme
from common.disk_space import require_disk_space
from common.errors import UserError
from common.files import (
    TEMPORARY_SUFFIX,
    disk_errors,
    failpoint,
    fsync_directory,
    rename_durably,
    replaced_name,
    restore_replaced,
)
from stages.store.backend import Report
from stages.store.digest import copy_hashed

#: Without it, nothing loads the model.
CONFIG = "config.json"
SCHEMES = ("hf", "s3", "file", "")


@dataclass(frozen=True)
class Publication:
    """What is published: files by name. `patterns`: names that files of any model can have."""

    files: Mapping[str, Path]
    patterns: tuple[str, ...]

    @property
    def total_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files.values())

    def is_of_a_model(self, name: str) -> bool:
        """Files in folders never are: another model may lie there, and fnmatch's * would match a slash."""
        return "/" not in name and any(fnmatch.fnmatchcase(name, pattern) for pattern in self.patterns)

    def superseded(self, names: Iterable[str]) -> list[str]:
        """Those of an earlier publication's `names` that this one does not have."""
        return sorted(name for name in names if self.is_of_a_model(name) and name not in self.files)


class Target(Protocol):
    """Where a model is published."""

    #: Without secrets.
    address: str
    #: Where `from_pretrained` finds it; PATH if it has to be fetched first.
    path: str
    #: Whether it shows the progress of an upload itself.
    shows_progress: bool

    def check(self, publication: Publication) -> None:
        """Raise `UserError` for what can be known without the network."""
        ...

    def publish(self, publication: Publication, report: Report) -> None:
        """Raises `UserError`; a rerun continues or starts over."""
        ...


def scheme_of(address: str) -> str:
    """One of `SCHEMES`. Raises `UserError`."""
    scheme = url_scheme(address)
    if scheme not in SCHEMES:
        raise UserError(f"{address}: {scheme}:// is unknown; allowed: hf://org/name, s3://bucket/prefix, or a folder")
    return scheme


class Folder:
    """A folder, which appears, or is replaced, in one step."""

    path, shows_progress = "PATH", False

    def __init__(self, address: str) -> None:
        self.folder = local_path(address).resolve()
        self.address = str(self.folder)
        if not self.folder.name:
            raise UserError(f"{address} is the root of the file system; give a folder in it")

    @property
    def _temporary(self) -> Path:
        return self.folder.with_name(self.folder.name + TEMPORARY_SUFFIX)

    def check(self, publication: Publication) -> None:
        if self.folder.exists() and not self.folder.is_dir():
            raise UserError(f"{self.folder} is a file; give a folder")
        # A killed run may have left the folder under another name.
        folder = self.folder if self.folder.exists() else replaced_name(self.folder)
        for replaced in (folder, self._temporary):
            # .nfs…: removed, but still open somewhere.
            there = sorted(set(replaced.iterdir()) - set(replaced.glob(".nfs*"))) if replaced.is_dir() else []
            others = [path for path in there if path.is_dir() or not publication.is_of_a_model(path.name)]
            if others:
                raise UserError(
                    f"{replaced} holds {others[0].name}, which is not part of a published model and would be removed; "
                    f"give a new folder, or one made by publish"
                )
        if any(path.resolve().is_relative_to(self.folder) for path in publication.files.values()):
            raise UserError(f"{self.folder} holds the model that is to be published; give another folder")

    def publish(self, publication: Publication, report: Report) -> None:
        temporary = self._temporary
        require_disk_space(self.folder.parent, publication.total_bytes, "the model needs")
        with disk_errors(self.folder):
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            fd = _own(temporary)
            try:
                restore_replaced(self.folder)
                for name, path in publication.files.items():
                    with path.open("rb", buffering=0) as source, (temporary / name).open("xb") as copy:
                        copy_hashed(source, copy, path.stat().st_size, report)
                    failpoint(f"publish:{name}")
                fsync_directory(temporary)
                rename_durably(temporary, self.folder)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
            finally:
                os.close(fd)


def _own(directory: Path) -> int:
    """Make the empty `directory`; returns a descriptor that holds its lock. What a killed run has left there is
    removed. Raises OSError, and `UserError` if another process is at work there."""
    if directory.exists():
        fd = _lock(directory)
        try:
            shutil.rmtree(directory)
        finally:
            os.close(fd)
    directory.mkdir()
    return _lock(directory)


def _lock(directory: Path) -> int:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise UserError(f"another process is publishing to {directory.with_suffix('')}; wait for it") from None
    return fd
