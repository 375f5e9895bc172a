"""A store in a folder: writers that stand still, and disks that cannot be read."""

from __future__ import annotations

import fcntl
import itertools
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import stages.store.folder
from common.errors import UserError
from common.secrets import Secret
from stages.store.backend import Backend, Conflict
from stages.store.files import ignore
from stages.store.open import open_store
from stages.store.options import StoreOptions
from tests.helpers.chain import wait_until
from tests.helpers.support import ROOT

WRITE = """
import sys
from common.secrets import Secret
from stages.store.open import open_store
from stages.store.options import StoreOptions
open_store(StoreOptions(url=Secret.address(sys.argv[1]))).write("leases/a.json", b"one", replaces=None)
"""

#: Appends "NAME number" to the record, again and again, and prints what it has appended.
APPEND = """
import itertools, sys
from common.secrets import Secret
from stages.store.backend import Conflict
from stages.store.open import open_store
from stages.store.options import StoreOptions
store, name = open_store(StoreOptions(url=Secret.address(sys.argv[1]))), sys.argv[2]
for number in itertools.count():
    while True:
        record, version = store.read("leases/a.json")
        line = f"{name} {number}\\n"
        try:
            store.write("leases/a.json", record + line.encode(), replaces=version)
            break
        except Conflict:
            pass
    print(line, end="", flush=True)
"""


@pytest.fixture
def backend(tmp_path: Path) -> Backend:
    return open_store(StoreOptions(url=Secret.address(str(tmp_path / "store"))))


def test_a_process_that_stands_still_blocks_its_own_record_alone(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = subprocess.Popen(
        [sys.executable, "-c", WRITE, str(tmp_path / "store")],
        cwd=ROOT, env={**os.environ, "FAILPOINT": "store-rename:a.json", "FAILPOINT_ACTION": "stop"},
    )  # fmt: skip
    try:
        wait_until(lambda: Path(f"/proc/{frozen.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T")
        monkeypatch.setattr(stages.store.folder, "_WAIT_S", 0.3)
        backend.write("leases/b.json", b"two", replaces=None)
        who = re.escape(f"process {frozen.pid} on {socket.gethostname()}, which may be suspended; ")
        said = rf"\.lock has been locked for 0\.3 s by {who}[^\n]*, then run the same again$"
        with pytest.raises(UserError, match=said):
            backend.write("leases/a.json", b"another", replaces=None)
        frozen.send_signal(signal.SIGCONT)
        assert frozen.wait(60) == 0
    finally:
        frozen.kill()
        frozen.wait()
    assert {entry.key: backend.read(entry.key)[0] for entry in backend.list("")} == {
        "leases/a.json": b"one", "leases/b.json": b"two",
    }  # fmt: skip


@pytest.mark.slow
def test_no_write_is_lost_among_processes_that_are_killed_at_any_moment(backend: Backend, tmp_path: Path) -> None:
    """Six processes append to one record; again and again one is killed and another begins. What was acknowledged is
    there, once and in order; what was not is at most the last line of each that was killed."""
    chance = random.Random(1)
    backend.write("leases/a.json", b"", replaces=None)

    def begin(name: str) -> tuple[str, subprocess.Popen[bytes]]:
        words = [sys.executable, "-c", APPEND, str(tmp_path / "store"), name]
        with (tmp_path / name).open("wb") as output:
            return name, subprocess.Popen(words, cwd=ROOT, stdout=output)

    def lines() -> int:
        return backend.read("leases/a.json")[0].count(b"\n")

    writers = [begin(f"writer{number}") for number in range(6)]
    wait_until(lambda: all((tmp_path / name).stat().st_size for name, _ in writers))
    for number in range(6, 26):
        before = lines()
        wait_until(lambda: lines() >= before + 2)  # noqa: B023
        time.sleep(chance.uniform(0, 0.1))
        name, killed = writers.pop(chance.randrange(len(writers)))
        killed.kill()
        killed.wait()
        writers.append(begin(f"writer{number}"))
    for _, writer in writers:
        writer.kill()
        writer.wait()
    found = backend.read("leases/a.json")[0].decode().splitlines()
    for number in range(26):
        name = f"writer{number}"
        said = (tmp_path / name).read_text().splitlines()
        mine = [line for line in found if line.split()[0] == name]
        assert mine == [f"{name} {index}" for index in range(len(mine))]
        assert len(mine) - len(said) in (0, 1)
    changes = sum(a.split()[0] != b.split()[0] for a, b in itertools.pairwise(found))
    assert changes > 20, "the writers are to take turns"


def test_an_earlier_version_and_this_one_exclude_each_other(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That one locks the whole folder of a record."""
    monkeypatch.setattr(stages.store.folder, "_WAIT_S", 0.1)
    version = backend.write("leases/a.json", b"one", replaces=None)
    with (tmp_path / "store/leases/.lock").open("r+b") as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=r"leases/\.lock has been locked for 0\.1 s by another process"):
            backend.write("leases/a.json", b"two", replaces=version)
        rename = os.replace

        def look(*paths: Path) -> None:
            with pytest.raises(BlockingIOError):
                fcntl.flock(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB)
            rename(*paths)

        fcntl.flock(theirs, fcntl.LOCK_UN)
        monkeypatch.setattr(os, "replace", look)
        backend.write("leases/a.json", b"two", replaces=version)
    assert backend.read("leases/a.json")[0] == b"two"


def test_the_record_is_compared_directly_before_it_is_replaced(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine writes while what is to be written goes to the disk, which may take long."""
    version = backend.write("leases/a.json", b"one", replaces=None)
    fsync = os.fsync

    def slow(fd: int) -> None:
        monkeypatch.setattr(os, "fsync", fsync)
        backend.write("leases/a.json", b"another's", replaces=version)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", slow)
    with pytest.raises(Conflict):
        backend.write("leases/a.json", b"two", replaces=version)
    assert [backend.read(entry.key)[0] for entry in backend.list("")] == [b"another's"]


def test_an_error_names_the_disk_that_it_is_of(backend: Backend, tmp_path: Path) -> None:
    """/proc/self/mem opens like any file, and its first bytes cannot be read: EIO."""
    stored, here = tmp_path / "store/objects/x", tmp_path / "here"
    stored.parent.mkdir(parents=True)
    for path in (stored, here):
        path.symlink_to("/proc/self/mem")
    with pytest.raises(UserError, match=rf"^cannot read {stored}: Input/output error; check the disk or network"):
        backend.download("objects/x", tmp_path / "down", 11, "0" * 64, ignore)
    with pytest.raises(UserError, match=rf"^cannot read {here}: Input/output error; check the disk or network"):
        backend.upload("objects/y", here, 11, "0" * 64, ignore)
    assert not (tmp_path / "down").exists()
    assert backend.present(["objects/y"]) == {}
    assert not list((tmp_path / "store").rglob("*.tmp"))
