"""Import shards into a stage directory: write each to a temporary path, validate it in a worker, then rename it."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import shutil
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from common.errors import UserError
from common.files import TEMPORARY_SUFFIX, disk_errors, failpoint, hard_link, rename_durably
from common.workers import Workers
from stages.directory.manifest import Output
from stages.transfer.archive import members
from trainer.data.file_names import HELD_OUT_SHARDS, TRAINING_SHARDS

_COPY_BYTES = 4 << 20
#: Linux: _IOW(0x94, 9, int) on all architectures except MIPS, PowerPC and SPARC, where the ioctl fails.
_FICLONE = 0x40049409


@dataclass(frozen=True)
class IncomingShard:
    """A shard to import; `put` writes it to a path and fsyncs it."""

    origin: str
    size: int
    put: Callable[[Path], None]


@dataclass(frozen=True)
class Limits:
    """What shards must match; None: any value."""

    seq_len: int | None = None
    max_pred_len: int | None = None
    vocab_size: int | None = None


@dataclass(frozen=True)
class Shard:
    """A validated shard."""

    rows: int
    seq_len: int
    #: Maximum predictions per sequence.
    max_pred_len: int
    output: Output


@dataclass(frozen=True)
class _Task:
    final: Path
    origin: str
    limits: Limits
    #: Whether it already has its final name, which it gets only after validation.
    is_placed: bool


def take_in(
    directory: Path, source: str, incoming: Generator[IncomingShard, None, None], limits: Limits, *, processes: int
) -> dict[str, Shard]:
    """Write, validate and rename all shards; those renamed by an earlier run are not written again.

    Raises `UserError` that names `source` and the file: an invalid shard, a duplicate name, lengths that differ from
    the first shard's.
    """
    origins: dict[str, str] = {}

    def tasks() -> Generator[_Task, None, None]:
        for shard in incoming:
            name = PurePosixPath(shard.origin).name
            if name in origins:
                both = f"{origins[name]} and {shard.origin}"
                raise UserError(f"{source} has {both}: two files share a name; rename one")
            origins[name] = shard.origin
            final = directory / name
            is_placed = final.exists()
            if not is_placed:
                with disk_errors(final):
                    shard.put(_temporary(final))
            yield _Task(final, f"{source}: {shard.origin}", limits, is_placed)

    shards: dict[str, Shard] = {}
    try:
        # Closed here, so that an archive does not stay open until garbage collection.
        with contextlib.closing(incoming), contextlib.closing(tasks()) as queue, Workers(processes) as workers:
            for task, shard in workers.map(_check, queue):
                first = next(iter(shards.values()), shard)
                _refuse_other_form(task, shard, first)
                if not task.is_placed:
                    failpoint(f"write-after:{task.final.name}")
                    rename_durably(_temporary(task.final), task.final)
                shards[task.final.name] = shard
    except UserError:
        for name in origins:
            _temporary(directory / name).unlink(missing_ok=True)
        raise
    return shards


def _check(task: _Task) -> tuple[_Task, Shard]:
    """Validate and hash a shard; one that is already in place is only checked for its shape and hashed."""
    from trainer.data.shards import KEYS, file_shape
    from trainer.data.validation import validate_file

    path = task.final if task.is_placed else _temporary(task.final)
    limits = {"seq_len": task.limits.seq_len, "max_pred_len": task.limits.max_pred_len}
    try:
        shape = file_shape(path, **limits)
        if not task.is_placed:
            validate_file(path, vocab_size=task.limits.vocab_size, **limits)
    except UserError as error:
        raise UserError(str(error).replace(str(path), task.origin)) from error
    if not shape.next_sentence:
        raise UserError(f"{task.origin} has no dataset next_sentence_labels; ready shards have {', '.join(KEYS)}")
    if shape.max_pred_len is None:
        raise UserError(
            f"{task.origin} has no masked_lm_positions: ready shards are used with their masks; give masked ones, or "
            f"make them from the text ([corpus] source)"
        )
    stat = path.stat()
    measured = Output.of(task.final.parent, path)
    output = Output(
        task.final.name, measured.bytes, measured.sha256, mtime_ns=stat.st_mtime_ns if stat.st_nlink > 1 else None
    )
    return task, Shard(shape.rows, shape.seq_len, shape.max_pred_len, output)


def _refuse_other_form(task: _Task, shard: Shard, first: Shard) -> None:
    if shard.seq_len != first.seq_len:
        what = f"has sequences of {shard.seq_len} tokens; {first.output.path} has {first.seq_len}"
    elif shard.max_pred_len != first.max_pred_len:
        what = f"has {shard.max_pred_len} predictions a sequence; {first.output.path} has {first.max_pred_len}"
    else:
        return
    raise UserError(f"{task.origin} {what}; all shards must have the same; use one data set")


def _temporary(final: Path) -> Path:
    return final.with_name(final.name + TEMPORARY_SUFFIX)


def is_shard(origin: str) -> bool:
    name = PurePosixPath(origin).name
    # macOS packs a "._name" file beside every file.
    return not name.startswith(".") and any(
        fnmatch.fnmatch(name, pattern) for pattern in (TRAINING_SHARDS, HELD_OUT_SHARDS)
    )


def folder_shards(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and is_shard(path.name))


def copied(folder: Path, directory: Path) -> Generator[IncomingShard, None, None]:
    """Yield the shards of a folder: reflinks where the file system supports them, else copies.

    Without disk space for copies, they are hard links, so the owner's edits change them too: a note says so, and the
    manifest records the modification time, which reveals an edit.
    """
    shards = folder_shards(folder)
    needed = sum(path.stat().st_size for path in shards if not (directory / path.name).exists())
    has_room, has_noted = needed < shutil.disk_usage(directory).free, False
    for path in shards:

        def put(temporary: Path, path: Path = path) -> None:
            nonlocal has_noted
            source = path.resolve()
            temporary.unlink(missing_ok=True)
            if not _clone(source, temporary):
                if not has_room and not has_noted:
                    has_noted = True
                    print(
                        f"note: no room in {directory} for {needed:,} bytes of copies, so its shards are hard links to "
                        f"the files in {folder}; leave these as they are",
                        file=sys.stderr,
                    )
                temporary.unlink(missing_ok=True)  # _clone has made it
                if has_room or not hard_link(source, temporary):
                    shutil.copyfile(source, temporary)
            _fsync(temporary)

        yield IncomingShard(str(path.relative_to(folder)), path.stat().st_size, put)


def _clone(source: Path, target: Path) -> bool:
    """Make `target` a reflink of `source` (copy on write); False if that is not supported."""
    if sys.platform != "linux":
        return False
    import fcntl

    with source.open("rb") as read, target.open("wb") as write:
        try:
            fcntl.ioctl(write, _FICLONE, read.fileno())
        except OSError:  # another file system, or no reflink support
            return False
    return True


def unpacked(archive: Path) -> Generator[IncomingShard, None, None]:
    """Yield all regular files of an archive, shards or not, in archive order; `put` each before taking the next."""
    with contextlib.closing(members(archive)) as found:
        for member in found:

            def put(temporary: Path, read: Callable[[int], bytes] = member.read) -> None:
                with temporary.open("wb") as file:
                    while data := read(_COPY_BYTES):
                        file.write(data)
                    file.flush()
                    os.fsync(file.fileno())

            yield IncomingShard(member.name, member.size, put)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
