"""Move many files to and from a store, in parallel; fetched files are trusted by their sha256 alone."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common.errors import DiskError, UserError
from common.files import TEMPORARY_SUFFIX, disk_errors, failpoint, fresh_directory, hard_link, sha256_of
from common.lock import exclusively
from stages.store.backend import Altered, Backend, Missing, Report, one_at_a_time
from stages.store.records import StoredFile
from trainer.checkpoint.directory import MANIFEST


class NotUsable(Exception):
    """What the store has, or what is to be pushed, is damaged or gone; carries the reason."""

    def __init__(self, reason: str, altered: Collection[str] = ()) -> None:
        super().__init__(reason)
        #: Keys of the store whose bytes do not match their sha256.
        self.altered = altered


def ignore(moved: int) -> None:
    """A `Report` that does nothing."""


def upload(backend: Backend, files: Mapping[str, StoredFile], paths: Mapping[str, Path], report: Report) -> set[str]:
    """Upload the files, by key, that the store lacks or has with another length; returns the keys of those that it
    already has. Raises `UserError` for one that was altered."""
    report = one_at_a_time(report)
    there = {key for key, size in backend.present(files.keys()).items() if size == files[key].bytes}
    report(sum(files[key].bytes for key in there))

    def send(key: str) -> None:
        file = files[key]
        try:
            backend.upload(key, paths[key], file.bytes, file.sha256, report)
        except Altered:
            raise UserError(f"{paths[key]} no longer matches its manifest; it is not pushed") from None
        failpoint("store-uploaded")

    _each(backend.connections, send, sorted(files.keys() - there, key=lambda key: -files[key].bytes))
    return there


def download(
    backend: Backend, files: Mapping[str, StoredFile], targets: Mapping[str, Sequence[Path]], report: Report = ignore
) -> None:
    """Download files by key, each to all of its targets. Raises `Missing`; `Altered` with the keys of all altered ones;
    `UserError`."""
    report = one_at_a_time(report)
    altered: list[str] = []

    def fetch(key: str) -> None:
        file, (first, *others) = files[key], targets[key]
        temporary = first.with_name(first.name + TEMPORARY_SUFFIX)
        for is_last in (False, True):  # what was altered in transit is intact at the second try
            with disk_errors(first):
                first.parent.mkdir(parents=True, exist_ok=True)
                temporary.unlink(missing_ok=True)
            try:
                backend.download(key, temporary, file.bytes, file.sha256, ignore if is_last else report)
                break
            except Altered:
                if is_last:
                    altered.append(key)
                    return
        for other in others:
            with disk_errors(other):
                other.parent.mkdir(parents=True, exist_ok=True)
                with temporary.open("rb") as source, other.open("wb") as copy:
                    shutil.copyfileobj(source, copy)
                    copy.flush()
                    os.fsync(copy.fileno())
        with disk_errors(first):
            os.replace(temporary, first)
        failpoint("store-downloaded")

    _each(backend.connections, fetch, sorted(files, key=lambda key: -files[key].bytes))
    if altered:
        raise Altered(*sorted(altered))


def _each(connections: int, work: Callable[[str], None], keys: Iterable[str]) -> None:
    """Call `work` for each key, in parallel; after an error, no new calls are started."""
    stop = threading.Event()

    def guarded(key: str) -> None:
        if stop.is_set():
            return
        try:
            work(key)
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(connections) as threads:
        futures = [threads.submit(guarded, key) for key in keys]
    for future in futures:
        future.result()


def one_push(directory: Path) -> contextlib.AbstractContextManager[None]:
    """Entered while something in a stage directory is pushed: another push from it waits. Raises `DiskError`."""
    return exclusively(directory / "push.lock")


@contextlib.contextmanager
def snapshot(directory: Path, names: Iterable[str], place: Path, *, copies: bool) -> Iterator[dict[str, Path]]:
    """Copies of files of `directory`, or hard links where those will do, in the new directory `place`, by name: they
    persist when the files change or are removed. Raises FileNotFoundError, `DiskError`."""
    place = place.with_name(place.name + TEMPORARY_SUFFIX)
    try:
        with disk_errors(place):
            fresh_directory(place)
        found = {name: place / str(number) for number, name in enumerate(names)}
        for name, path in found.items():
            if copies or not hard_link(directory / name, path):
                _copy(directory / name, path)
        yield found
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _copy(source: Path, target: Path) -> None:
    """Raises FileNotFoundError, `DiskError`."""
    try:
        shutil.copyfile(source, target)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DiskError.of(error, target) from None


def measured(path: Path, name: str) -> StoredFile:
    return StoredFile(name, path.stat().st_size, sha256_of(path))


def checkpoint_files(manifest: Path) -> list[StoredFile]:
    """The files of a checkpoint, according to its manifest."""
    content = json.loads(manifest.read_bytes())
    listed = [StoredFile(entry["path"], entry["bytes"], entry["sha256"]) for entry in content["files"]]
    return [*listed, measured(manifest, MANIFEST)]


def reason(error: Exception) -> str:
    """Why something in the store cannot be used."""
    if isinstance(error, Missing):
        return f"{error} is missing"
    return f"{', '.join(error.args)}: bytes do not match the sha256" if isinstance(error, Altered) else str(error)
