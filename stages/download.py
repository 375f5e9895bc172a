"""Ready-made shards → a data set of ours: fetched, safely unpacked, checked once. `python -m stages.download --help`.

A file gets its final name after it was checked, so that a rerun goes on with the first that is missing. What a kind
of URL needs is one function in `FETCHERS`.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from stages.archive import DamagedArchive, members
from stages.command import run
from stages.manifest import Identity, Output, StageDirectory
from trainer.errors import UserError
from trainer.files import TEMPORARY_SUFFIX, disk_errors, failpoint, rename_durably

STAGE = "download_dataset"
FORMAT_VERSION = 1

_PATTERNS = {"training": "*_training_*.hdf5", "test": "*_test_*.hdf5"}
_COPY_BYTES = 4 << 20
_SAMPLE_BYTES = 64 << 10


@dataclass(frozen=True)
class DownloadOptions:
    """Where the shards come from, and what they must be (None: whatever they are)."""

    url: str
    seq_len: int | None = None
    #: Predictions of a sequence, at most.
    max_pred_len: int | None = None
    vocab_size: int | None = None

    def identity(self, phase: int | None = None) -> Identity:
        parameters = {"seq_len": self.seq_len, "max_pred_len": self.max_pred_len, "vocab_size": self.vocab_size}
        return Identity(
            stage=STAGE, format_version=FORMAT_VERSION, phase=phase, parameters=parameters,
            inputs={"source": source_identity(self.url)},
        )  # fmt: skip


@dataclass(frozen=True)
class Fetcher:
    """How one kind of URL is handled."""

    #: What tells the content behind the URL from any other, cheaply.
    identity: Callable[[str], str]
    #: The archive or folder behind the URL as a local path; it may be put into the stage directory.
    fetch: Callable[[str, Path], Path]


def _local_path(url: str) -> Path:
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.netloc not in ("", "localhost"):
        raise UserError(f"{url} names the host {parts.netloc}; write file:///absolute/path (three slashes)")
    path = Path(unquote(parts.path)) if parts.scheme == "file" else Path(url)
    if not path.exists():
        raise UserError(f"there is no archive or folder {path}; give a .tar, .tar.gz, .tar.zst or a folder of shards")
    return path


def _local_identity(url: str) -> str:
    """sha256 over names, sizes and both ends of every file: content decides, and terabytes need not be read."""
    path = _local_path(url)
    digest = hashlib.sha256()
    for file in _folder_shards(path) if path.is_dir() else [path]:
        size = file.stat().st_size
        digest.update(f"{file.name if path.is_dir() else ''}\0{size}\0".encode())
        with file.open("rb") as raw:
            digest.update(raw.read(_SAMPLE_BYTES))
            raw.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(raw.read(_SAMPLE_BYTES))
    return digest.hexdigest()


#: URL scheme ("" for a plain path) → fetcher.
FETCHERS = {scheme: Fetcher(_local_identity, lambda url, _: _local_path(url)) for scheme in ("", "file")}
_PLANNED = ("s3", "http", "https")


def _fetcher(url: str) -> Fetcher:
    scheme = urlsplit(url).scheme
    if scheme in FETCHERS:
        return FETCHERS[scheme]
    if scheme in _PLANNED:
        raise UserError(f"cannot fetch {url}: {scheme}:// is not built yet; download it and give file:///path of it")
    raise UserError(f"cannot fetch {url}: {scheme}:// is unknown; allowed is file:// or a plain path")


def source_identity(url: str) -> str:
    """What tells the content behind `url` from any other, cheaply. Raises `UserError` if it cannot be had."""
    return _fetcher(url).identity(url)


def download_dataset(work: StageDirectory, options: DownloadOptions) -> dict[str, Any]:
    """Fill `work` with the checked shards behind the URL, and finish it; returns the counts.

    Raises `UserError`: nothing there, an unsafe or damaged archive, no training shard, a file that is no valid shard.
    """
    source = _fetcher(options.url).fetch(options.url, work.path)
    check, folder = _Check(options), source.is_dir()
    total = len(_folder_shards(source)) if folder else source.stat().st_size
    rows: dict[str, int] = {}
    origins: dict[str, str] = {}
    skipped = 0
    try:
        with work.progress("check" if folder else "unpack", total, "files" if folder else "B") as bar:
            for arrival in _linked(source) if folder else _unpacked(source):
                bar.update(1 if folder else arrival.size)
                if not _is_shard(arrival.origin):
                    skipped += 1
                    continue
                name = PurePosixPath(arrival.origin).name
                if name in origins:
                    both = f"{origins[name]} and {arrival.origin}"
                    raise UserError(f"{source} has {both}: two files of one name; rename one")
                origins[name] = arrival.origin
                rows[name] = check(arrival, work.path / name, f"{source}: {arrival.origin}")
    except DamagedArchive:
        for name in rows:
            (work.path / name).unlink()
        raise
    if not any(fnmatch.fnmatch(name, _PATTERNS["training"]) for name in rows):
        raise UserError(f"{source} has no training shard; their names must match {_PATTERNS['training']}")
    by_split = {
        f"{split}_rows": sum(count for name, count in rows.items() if fnmatch.fnmatch(name, pattern))
        for split, pattern in _PATTERNS.items()
    }
    counts = {"rows": dict(sorted(rows.items())), **by_split, "files_skipped": skipped, "seq_len": check.seq_len}
    work.finish([Output.of(work.path, work.path / name) for name in sorted(rows)], counts)
    return counts


@dataclass(frozen=True)
class _Arrival:
    """A file on its way: `put` makes it at a temporary path, fsynced."""

    origin: str
    size: int
    put: Callable[[Path], None]


class _Check:
    """Puts shards in place when they are valid; all must have the sequence length of the first."""

    def __init__(self, options: DownloadOptions) -> None:
        self._options = options
        self.seq_len = options.seq_len

    def __call__(self, arrival: _Arrival, final: Path, origin: str) -> int:
        """Put, check and rename one file; returns its rows. Raises `UserError` that names `origin`."""
        from trainer.data.shards import file_shape, validate_file

        limits = {"seq_len": self.seq_len, "max_pred_len": self._options.max_pred_len}
        if final.exists():  # it got this name after it was checked
            rows, self.seq_len, _ = file_shape(final, **limits)
            return rows
        temporary = final.with_name(final.name + TEMPORARY_SUFFIX)
        try:
            with disk_errors(final):
                arrival.put(temporary)
            try:
                rows, self.seq_len, _ = file_shape(temporary, **limits)
                validate_file(temporary, vocab_size=self._options.vocab_size, **limits)
            except UserError as error:
                raise UserError(str(error).replace(str(temporary), origin)) from error
        except UserError:
            temporary.unlink(missing_ok=True)
            raise
        failpoint(f"write-after:{final.name}")
        rename_durably(temporary, final)
        return rows


def _is_shard(origin: str) -> bool:
    name = PurePosixPath(origin).name
    # macOS adds "._name" beside every file it packs
    return not name.startswith(".") and any(fnmatch.fnmatch(name, pattern) for pattern in _PATTERNS.values())


def _folder_shards(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and _is_shard(path.name))


def _linked(folder: Path) -> Iterator[_Arrival]:
    for path in _folder_shards(folder):
        yield _Arrival(str(path.relative_to(folder)), path.stat().st_size, _linker(path.resolve()))


def _linker(source: Path) -> Callable[[Path], None]:
    def put(temporary: Path) -> None:
        temporary.unlink(missing_ok=True)
        try:
            os.link(source, temporary)  # no copy of what may be a hundred gigabytes
        except OSError:  # another file system, or one without links
            shutil.copyfile(source, temporary)
        _fsync(temporary)

    return put


def _unpacked(archive: Path) -> Iterator[_Arrival]:
    for member in members(archive):

        def put(temporary: Path, read: Callable[[int], bytes] = member.read) -> None:
            with temporary.open("wb") as file:
                while data := read(_COPY_BYTES):
                    file.write(data)
                file.flush()
                os.fsync(file.fileno())

        yield _Arrival(member.name, member.size, put)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog="python -m stages.download", description="Fetch, unpack and check ready HDF5 shards."
    )
    add = options.add_argument
    add("url", help="file:// URL or path of a .tar, .tar.gz, .tar.zst or a folder of HDF5 shards")
    add("--out", type=Path, required=True, metavar="DIR", help="stage directory to make or go on with")
    add("--seq-len", type=int, help="tokens that every row must have (default: as they are)")
    add("--max-pred-len", type=int, help="masked positions that a row may have (default: as they are)")
    add("--vocab-size", type=int, help="every id must be below (default: not checked)")
    return options


def main() -> None:
    args = parser().parse_args()
    options = DownloadOptions(args.url, args.seq_len, args.max_pred_len, args.vocab_size)
    with StageDirectory.begin(args.out, options.identity) as work:
        counts = download_dataset(work, options)
    print(f"{counts['training_rows']:,} training and {counts['test_rows']:,} test rows: {args.out}")


if __name__ == "__main__":
    run(main)
