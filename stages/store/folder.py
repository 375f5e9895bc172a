"""A store in a folder, which several machines may share (NFS)."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import BinaryIO

from common.errors import UserError
from common.files import TEMPORARY_SUFFIX, disk_errors, failpoint, fsync_directory
from common.lock import exclusively
from stages.store.backend import Altered, Conflict, Entry, Missing, Report
from stages.store.digest import copy_hashed
from stages.store.options import StoreOptions
from stages.store.records import PREFIXES

#: In each directory of small objects: locked while one of them is compared and replaced.
_LOCK = ".lock"


class FolderBackend:
    def __init__(self, options: StoreOptions) -> None:
        self.url, self.connections = options.place, options.connections
        self.root = Path(self.url)

    def read(self, key: str) -> tuple[bytes, str]:
        with _readable(self.root / key):
            data = (self.root / key).read_bytes()
        return data, _version(data)

    def write(self, key: str, data: bytes, *, replaces: str | None) -> str:
        path = self.root / key
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        with exclusively(path.with_name(_LOCK)):  # excludes other writers of small objects in the folder
            try:
                before: str | None = self.read(key)[1]
            except Missing:
                before = None
            if before != replaces:
                raise Conflict(key)
            with _new_file(path) as file:
                file.write(data)
        return _version(data)

    def delete(self, keys: Collection[str]) -> None:
        for key in keys:
            with disk_errors(self.root / key):
                (self.root / key).unlink(missing_ok=True)

    def list(self, prefix: str) -> Iterator[Entry]:
        # Only the directory that the prefix names is read.
        folder = prefix.rpartition("/")[0]
        for parent, _, names in os.walk(self.root / folder, onerror=_refuse):
            for name in names:
                path = Path(parent) / name
                key = path.relative_to(self.root).as_posix()
                if name == _LOCK or name.endswith(TEMPORARY_SUFFIX) or not key.startswith(prefix):
                    continue
                with contextlib.suppress(Missing), _readable(path):  # deleted meanwhile
                    stat = path.stat()
                    yield Entry(key, stat.st_size, stat.st_mtime)

    def present(self, keys: Collection[str]) -> dict[str, int]:
        found = {}
        for key in keys:
            with contextlib.suppress(Missing), _readable(self.root / key):
                found[key] = (self.root / key).stat().st_size
        return found

    def upload(self, key: str, path: Path, size: int, sha256: str, report: Report) -> None:
        final = self.root / key
        with disk_errors(final):
            final.parent.mkdir(parents=True, exist_ok=True)
        with path.open("rb", buffering=0) as source, _new_file(final) as copy:
            _copy(source, copy, key, size, sha256, report)

    def download(self, key: str, path: Path, size: int, sha256: str, report: Report) -> None:
        with _readable(self.root / key):
            source = (self.root / key).open("rb", buffering=0)
        try:
            with source, disk_errors(path), path.open("xb") as copy:
                _copy(source, copy, key, size, sha256, report)
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def sweep(self, before: float) -> int:
        swept = 0
        walks = (os.walk(self.root / prefix, onerror=_refuse) for prefix in PREFIXES)
        for parent, _, names in itertools.chain.from_iterable(walks):
            for path in (Path(parent) / name for name in names if name.endswith(TEMPORARY_SUFFIX)):
                with contextlib.suppress(Missing), _readable(path):
                    is_left = path.stat().st_mtime < before
                    swept += is_left
                    if is_left:
                        path.unlink(missing_ok=True)
        return swept


def _copy(source: BinaryIO, copy: BinaryIO, key: str, size: int, sha256: str, report: Report) -> None:
    if copy_hashed(source, copy, size, report) != (size, sha256):
        raise Altered(key)


@contextlib.contextmanager
def _new_file(final: Path) -> Iterator[BinaryIO]:
    """A file that appears under its name whole and durable, or not at all; any number of writers may do so at once."""
    temporary = final.with_name(f"{final.name}.{uuid.uuid4().hex}{TEMPORARY_SUFFIX}")
    try:
        with disk_errors(final), temporary.open("xb") as raw:
            yield raw
            raw.flush()
            os.fsync(raw.fileno())
        failpoint(f"store-rename:{final.name}")
        with disk_errors(final):
            os.replace(temporary, final)
            fsync_directory(final.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise Missing(str(path)) from None
    except OSError as error:
        raise UserError(f"the store's {path} cannot be read: {error.strerror}; check its permissions") from error


def _refuse(error: OSError) -> None:
    """For os.walk, which otherwise skips what it cannot read."""
    with contextlib.suppress(Missing), _readable(Path(error.filename)):
        raise error


def _version(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
