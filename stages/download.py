"""Ready-made shards → a data set of this project: fetched, safely unpacked, checked once.

A file gets its final name only after it is checked, so a rerun continues with the first missing one. While an archive
is fetched and unpacked, DIR holds
    download.part, download.json   the bytes fetched so far, and their ranges; download.json stays
    archive                        the whole archive, its length and sha256 checked
    unpacked.json                  its contents; written before the archive is removed, kept until the manifest exists
so an interruption at any point never fetches it a second time.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fnmatch
import re
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from common.disk_space import require_disk_space
from common.errors import DiskError, UserError
from common.files import read_json, write_json
from common.hashing import InputHashes, changed
from common.options import option
from common.process import available_cores
from common.secrets import Secret
from stages.directory.command import run
from stages.directory.manifest import MANIFEST, Output, StageDirectory
from stages.directory.options import StageOptions, parse, stage_parser
from stages.transfer.archive import DamagedArchive
from stages.transfer.fetch import fetch, require_sha256
from stages.transfer.partial import State
from stages.transfer.remote import Remote, Version
from stages.transfer.shard_import import (
    IncomingShard,
    Limits,
    copied,
    folder_shards,
    is_shard,
    take_in,
    unpacked,
)
from stages.transfer.urls import (
    Transport,
    file_identity,
    folder_identity,
    open_source,
    source_inputs,
)
from trainer.data.file_names import HELD_OUT_SHARDS, TRAINING_SHARDS

ARCHIVE = "archive"
UNPACKED = "unpacked.json"
#: Assumed compression ratio of a compressed archive (.gz and the like), for the free-space check.
#: Measured: 2.9 to 3.5 for contiguous shards, 1.04 for shards that are compressed themselves.
PACKED_RATIO = 4


@dataclass(frozen=True, kw_only=True)
class DownloadOptions(Transport, StageOptions):
    """The source of the shards, and the properties they must have (None: any)."""

    module: ClassVar = "stages.download"
    stage: ClassVar = "download_dataset"

    url: Secret = option(
        names=("url",),
        metavar="URL",
        help="s3://bucket/key, https://, http:// or file:// URL or path of a .tar, .tar.gz or .tar.zst; or path of a "
        "folder of HDF5 shards",
    )
    seq_len: int | None = option(None, unit="tokens", help="required length of every row (default: any)")
    max_pred_len: int | None = option(None, unit="positions", help="maximum masked positions of a row (default: any)")
    vocab_size: int | None = option(None, unit="pieces", help="every id must be below this (default: not checked)")
    sha256: str | None = option(
        None, metavar="HEX", decides=False, help="required sha256 of the archive (default: not checked)"
    )
    phase: int | None = option(
        None, help="pretraining phase the shards are for; part of the identity", decides=False, least=1, most=2
    )
    keep_archive: bool = option(False, decides=False, help="keep the fetched archive as DIR/archive")
    processes: int = option(
        0, least=0, decides=False, help="processes that check shards; 0: one per core; does not affect the output"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sha256 is not None and not re.fullmatch("[0-9a-fA-F]{64}", self.sha256):
            raise UserError(f"--sha256 is {self.sha256}; give 64 hexadecimal digits")

    def inputs(self, hashes: InputHashes, upstream: Mapping[str, str]) -> dict[str, Any]:
        return source_inputs(self.url, self.expected_sha256, hashes)

    @property
    def expected_sha256(self) -> str | None:
        return self.sha256 and self.sha256.lower()

    @property
    def limits(self) -> Limits:
        return Limits(self.seq_len, self.max_pred_len, self.vocab_size)


def download_dataset(work: StageDirectory, options: DownloadOptions) -> dict[str, Any]:
    """Fetch, unpack and check the shards into `work` and complete it; returns the counts.

    Raises `UserError` if the source is missing or inaccessible, the disk lacks space, the archive is unsafe or damaged,
    there is no training shard, or a shard is invalid.
    """
    source = open_source(options.url, options)
    if isinstance(source, Path):
        if options.expected_sha256 is not None:
            require_sha256(source, str(source), work, options.expected_sha256)
        outputs, counts = _from_here(work, source, options)
    else:
        outputs, counts = _before(work.path) or _from_network(work, source, options)
        if not options.keep_archive:
            (work.path / ARCHIVE).unlink(missing_ok=True)
    work.finish(outputs, counts)
    (work.path / UNPACKED).unlink(missing_ok=True)
    return counts


def _from_here(work: StageDirectory, source: Path, options: DownloadOptions) -> tuple[list[Output], dict[str, Any]]:
    """Import a local file or folder; it must match the identity, and not change meanwhile."""
    expected = work.identity.inputs["source"]
    if source.is_dir():
        outputs, counts = _take_in(work, source, str(source), options)
        # Hash the copies: they are what was checked, and no other process writes to them.
        if folder_identity({output.path: output.sha256 for output in outputs}) != expected:
            for path in _placed(work.path):
                path.unlink()
            raise changed(source)
        return outputs, counts
    file = InputHashes.beside(work.path).hash([source])[0]
    if file_identity(file.sha256) != expected:
        raise changed(source)
    return _take_in(work, source, str(source), options, after_each=file.require_unchanged)


def _from_network(
    work: StageDirectory, source: Remote, options: DownloadOptions
) -> tuple[list[Output], dict[str, Any]]:
    archive = work.path / ARCHIVE

    def begin(version: Version, missing: int, is_same: bool) -> None:
        if not is_same:
            _forget(work.path)
        _require_room(work.path, source.url, archive=missing, contents=unpacked_bytes(source.url, version.length))

    version = fetch(
        source,
        work,
        archive,
        connections=options.connections,
        least_rate=options.least_rate,
        sha256=options.expected_sha256,
        begin=begin,
    )
    try:
        outputs, counts = _take_in(work, archive, source.url, options)
    except DamagedArchive as error:
        archive.unlink()
        raise UserError(f"{str(error).replace(str(archive), source.url)} (the fetched file was removed)") from error
    except DiskError:
        raise
    except UserError as error:
        State(source.url, version, [(0, version.length)], refused=True).write(work.path)
        raise UserError(str(error).replace(str(archive), source.url)) from error
    counts["source"] = {"url": source.url, **dataclasses.asdict(version)}
    record = {"outputs": [output.record() for output in outputs], "counts": counts}
    write_json(work.path / UNPACKED, record)
    return outputs, counts


def _before(directory: Path) -> tuple[list[Output], dict[str, Any]] | None:
    """Outputs and counts of a run killed after unpacking, before its manifest; None unless all files still exist."""
    record = read_json(directory / UNPACKED)
    if record is None:
        return None
    outputs = [Output(**output) for output in record["outputs"]]
    paths = [directory / output.path for output in outputs]
    if not all(path.exists() and path.stat().st_size == o.bytes for path, o in zip(paths, outputs, strict=True)):
        return None
    return outputs, record["counts"]


def _forget(directory: Path) -> None:
    """Remove the files of another version of the object."""
    for path in (directory / MANIFEST, directory / UNPACKED, *_placed(directory)):
        path.unlink(missing_ok=True)


def _placed(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if is_shard(path.name)]


def unpacked_bytes(name: str, archive_bytes: int) -> int:
    """Bytes of an archive's contents; an estimate for a compressed one."""
    is_packed = name.partition("?")[0].endswith((".gz", ".tgz", ".zst", ".xz", ".bz2"))
    return archive_bytes * (PACKED_RATIO if is_packed else 1)


def _require_room(directory: Path, name: str, *, archive: int, contents: int) -> None:
    """Raise `DiskError` unless there is room for the archive and for the contents not yet in `directory`."""
    contents = max(0, contents - sum(path.stat().st_size for path in _placed(directory)))
    about = f", estimated at {PACKED_RATIO} times the archive's size" if unpacked_bytes(name, 1) > 1 else ""
    what = f"{name} ({archive:,} bytes still to fetch, {contents:,} of contents{about}) needs"
    require_disk_space(directory, archive + contents, what)


def _take_in(
    work: StageDirectory,
    source: Path,
    name: str,
    options: DownloadOptions,
    after_each: Callable[[], None] = lambda: None,
) -> tuple[list[Output], dict[str, Any]]:
    """Check all shards of an archive or folder and move them into place; returns outputs and counts.

    `after_each` is called once a file has been read, before it is checked and named; it may raise.
    """
    folder = source.is_dir()
    if not folder:
        _require_room(work.path, name, archive=0, contents=unpacked_bytes(name, source.stat().st_size))
    processes = options.processes or available_cores()
    total = len(folder_shards(source)) if folder else unpacked_bytes(name, source.stat().st_size)
    left, skipped = total, 0

    def incoming() -> Generator[IncomingShard, None, None]:
        nonlocal left, skipped
        for shard in shards_found:
            done = min(1 if folder else shard.size, left)  # a compressed archive's total is an estimate
            left -= done
            bar.update(done)
            if is_shard(shard.origin):

                def put(temporary: Path, shard: IncomingShard = shard) -> None:
                    shard.put(temporary)
                    after_each()

                yield dataclasses.replace(shard, put=put)
            else:
                skipped += 1

    try:
        with (
            contextlib.closing(copied(source, work.path) if folder else unpacked(source)) as shards_found,
            work.progress("check" if folder else "unpack", total, "files" if folder else "B") as bar,
        ):
            shards = take_in(work.path, name, incoming(), options.limits, processes=processes)
    except DamagedArchive:
        for path in _placed(work.path):
            path.unlink()
        raise
    rows = {name: shards[name].rows for name in sorted(shards)}
    if not fnmatch.filter(rows, TRAINING_SHARDS):
        raise UserError(f"{name} has no training shards; their names must match {TRAINING_SHARDS}")
    by_split = {
        split: sum(rows[one] for one in fnmatch.filter(rows, pattern))
        for split, pattern in (("training_rows", TRAINING_SHARDS), ("test_rows", HELD_OUT_SHARDS))
    }
    seq_len = next(iter(shards.values())).seq_len
    counts = {"rows": rows, **by_split, "files_skipped": skipped, "seq_len": seq_len}
    return [shards[name].output for name in rows], counts


def parser() -> argparse.ArgumentParser:
    return stage_parser(DownloadOptions, "Fetch, unpack and check ready HDF5 shards.")


def main() -> None:
    options, out = parse(DownloadOptions, parser())
    with StageDirectory.begin(out, lambda: options.identity(InputHashes.beside(out))) as work:
        counts = download_dataset(work, options)
    print(f"{counts['training_rows']:,} training and {counts['test_rows']:,} test rows: {out}")


if __name__ == "__main__":
    run(main)
