"""What is said to be durable was fsynced whole, in the right order. A kill keeps the page cache: it cannot tell."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from common.files import durable_file, rename_durably, write_json
from tests.helpers.checkpoints import save, snapshot

#: What the tests look at: an inode that was fsynced, with the size that it had then, or a name that a file got.
Event = tuple[str, int, int]


@dataclass
class Disk:
    """fsyncs and renames of this process, in their order."""

    events: list[Event] = field(default_factory=list)

    def named(self, path: Path) -> int:
        """When `path` got its name."""
        inode = path.stat().st_ino
        (at,) = (n for n, (what, *found) in enumerate(self.events) if what == "rename" and found[0] == inode)
        return at

    def size_when_synced(self, path: Path, *, before: int) -> int | None:
        """The file's size at its last fsync before an event."""
        inode = path.stat().st_ino
        sizes = [size for what, found, size in self.events[:before] if what == "fsync" and found == inode]
        return sizes[-1] if sizes else None

    def is_synced_after(self, directory: Path, at: int) -> bool:
        inode = directory.stat().st_ino
        return any(what == "fsync" and found == inode for what, found, _ in self.events[at:])


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    seen = Disk()
    fsync, replace, rename = os.fsync, os.replace, Path.rename

    def synced(fd: int) -> None:
        found = os.fstat(fd)
        seen.events.append(("fsync", found.st_ino, found.st_size))
        fsync(fd)

    def replaced(source: Path, target: Path) -> None:
        seen.events.append(("rename", os.stat(source).st_ino, 0))
        replace(source, target)

    def renamed(source: Path, target: Path) -> Path:
        seen.events.append(("rename", os.stat(source).st_ino, 0))
        return rename(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    monkeypatch.setattr(Path, "rename", renamed)
    return seen


def assert_durable(disk: Disk, path: Path) -> None:
    """All of the file was fsynced before it got its name, and its name after that."""
    at = disk.named(path)
    assert disk.size_when_synced(path, before=at) == path.stat().st_size
    assert disk.is_synced_after(path.parent, at)


def write_directly(path: Path) -> None:
    with durable_file(path) as file:
        file.write(b"a few bytes, which wait in a buffer")


@pytest.mark.parametrize("write", [write_directly, lambda path: write_json(path, {"a": [1, 2, 3]})])
@pytest.mark.parametrize("is_there", [False, True])
def test_a_file_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, disk: Disk, write: Callable[[Path], None], is_there: bool
) -> None:
    if is_there:
        (tmp_path / "file").write_text("earlier")
    write(tmp_path / "file")
    assert_durable(disk, tmp_path / "file")


def test_a_directory_has_its_name_on_the_disk(tmp_path: Path, disk: Disk) -> None:
    (tmp_path / "new.tmp").mkdir()
    rename_durably(tmp_path / "new.tmp", tmp_path / "new")
    assert disk.is_synced_after(tmp_path, disk.named(tmp_path / "new"))


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path: Path, disk: Disk) -> None:
    """Each of its files, and the names of them in it."""
    save(tmp_path, dataclasses.replace(snapshot(step=4)))
    checkpoint = tmp_path / "ckpt_4"
    at = disk.named(checkpoint)
    files = list(checkpoint.iterdir())
    assert len(files) == 4
    for path in files:
        assert disk.size_when_synced(path, before=at) == path.stat().st_size, path.name
    directory = checkpoint.stat().st_ino
    synced = [n for n, (what, inode, _) in enumerate(disk.events[:at]) if (what, inode) == ("fsync", directory)]
    made = [n for n, (_, inode, _) in enumerate(disk.events[:at]) if inode in {path.stat().st_ino for path in files}]
    assert max(synced, default=-1) > max(made)
    assert disk.is_synced_after(tmp_path, at)
