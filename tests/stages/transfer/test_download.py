"""Ready-made shards: taken whole and checked, or refused in one line with nothing harmed."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.secrets import Secret
from stages.directory.manifest import Identity, StageDirectory
from stages.directory.progress import Progress
from stages.download import DownloadOptions
from tests.conftest import Stage
from tests.helpers.ready import bytes_of, download, pack, refused, write
from tests.helpers.support import assert_one_line_error
from trainer.data.shards import ShardSet


def put_folder(folder: Path) -> object:
    return folder


@pytest.mark.parametrize(
    "put",
    [
        put_folder,
        lambda folder: folder.as_uri(),
        lambda folder: pack(folder, ""),
        lambda folder: pack(folder, "gz").as_uri(),
        lambda folder: pack(folder, "zst"),
    ],
    ids=["folder", "folder-url", "tar", "tar.gz-url", "tar.zst"],
)
def test_shards_arrive_whole_from_folders_and_archives(folder: Path, put: Callable[[Path], object]) -> None:
    out = folder.parent / "out"
    counts = download(put(folder), out, seq_len=16, max_pred_len=2, vocab_size=100)
    assert counts["rows"] == {"wiki_test_0.hdf5": 3, "wiki_training_0.hdf5": 6, "wiki_training_1.hdf5": 7}
    assert (counts["training_rows"], counts["test_rows"], counts["seq_len"]) == (13, 3, 16)
    for name in counts["rows"]:
        assert (out / name).read_bytes() == (folder / "deep" / name).read_bytes()
    assert ShardSet.open(out).rows == 13
    assert not list(out.glob("*.tmp"))


def test_nvidias_shards_go_through_the_command(tmp_path: Path, shared: Path, stage: Stage) -> None:
    source = shared / "fixtures/nvidia_hdf5/seq512"
    arguments = (source, "--out", tmp_path, "--seq-len", 512, "--max-pred-len", 80, "--vocab-size", 8192)
    ran = stage("download", *arguments)
    assert ran.returncode == 0, ran.stderr
    assert json.loads((tmp_path / "manifest.json").read_text())["counts"]["training_rows"] == 2388
    assert "complete already" in stage("download", *arguments).stderr


def test_a_killed_download_goes_on_where_it_was(folder: Path, stage: Stage) -> None:
    out = folder.parent / "out"
    path = pack(folder, "gz")
    assert stage("download", path, "--out", out, FAILPOINT="write-after:wiki_training_1.hdf5").returncode == -9
    there = {file: file.stat().st_mtime_ns for file in out.glob("*.hdf5")}
    assert there, "the one before is made"
    assert "wiki_training_1.hdf5" not in {file.name for file in there}
    assert stage("download", path, "--out", out).returncode == 0
    assert {file: file.stat().st_mtime_ns for file in there} == there
    assert ShardSet.open(out).rows == 13


def test_invalid_shards_are_refused_by_file_key_row_and_value(folder: Path) -> None:
    out = folder.parent / "out"
    message = refused(pack(folder, ""), out, vocab_size=50)
    assert "shards.tar: shards/deep/wiki_t" in message
    assert "input_ids is 99 in row 0; allowed: 0 to 49" in message
    assert not list(out.glob("*.hdf5*"))
    assert "has sequences of 16 tokens; 128 were asked for" in refused(folder, folder.parent / "o2", seq_len=128)
    other = write(folder / "other_training_9.hdf5", S=32)
    assert "has sequences of 32 tokens; wiki_test_0.hdf5 has 16" in refused(folder, folder.parent / "o3")
    write(other, P=3)
    assert "has 3 predictions a sequence; wiki_test_0.hdf5 has 2" in refused(folder, folder.parent / "o4")
    assert not list(folder.parent.glob("o*/*.tmp"))


def test_shards_checked_by_two_processes_are_those_checked_by_one(folder: Path) -> None:
    for number in range(12):
        write(folder / f"more_training_{number:02}.hdf5", rows=number, largest=number)
    path = pack(folder, "")
    assert download(path, folder.parent / "two", processes=2) == download(path, folder.parent / "one")
    assert bytes_of(folder.parent / "two") == bytes_of(folder)
    files = [json.loads((folder.parent / name / "manifest.json").read_text())["outputs"] for name in ("one", "two")]
    assert files[0] == files[1]
    write(folder / "more_training_07.hdf5", largest=101)
    assert "more_training_07.hdf5: input_ids is 101" in refused(
        pack(folder, ""), folder.parent / "bad", processes=2, vocab_size=101
    )
    assert not list((folder.parent / "bad").glob("*.tmp"))


def test_the_sha256_of_an_archive_is_checked_and_decides(folder: Path) -> None:
    path = pack(folder, "")
    right = hashlib.sha256(path.read_bytes()).hexdigest()
    assert download(path, folder.parent / "out", sha256=right)["training_rows"] == 13
    assert f"the sha256 {right}, not the expected {'0' * 64}" in refused(path, folder.parent / "o2", sha256="0" * 64)
    assert "is a folder, which has no sha256" in refused(folder, folder.parent / "o3", sha256=right)
    identities = [
        DownloadOptions(url=Secret.address(str(path)), sha256=sha256).identity().fingerprint
        for sha256 in (None, right, "0" * 64)
    ]
    assert len(set(identities)) == 3


def test_an_archive_is_refused_before_it_fills_the_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    huge = folder.parent / "huge.tar.gz"
    huge.write_bytes(bytes(1000))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3999))
    message = refused(huge, folder.parent / "out")
    assert "needs 4,000 bytes" in message
    assert "estimated at 4 times the archive's size" in message
    assert "3,999 are free there; make space" in message


def test_the_progress_of_a_packed_archive_stays_below_its_total(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its contents are 4 times as large, is the estimate; these are more."""
    (folder / "deep" / "notes.txt").write_bytes(bytes(1 << 20))
    packed, totals, units, progress = pack(folder, "gz"), list[int](), list[int](), StageDirectory.progress

    def watched(self: StageDirectory, label: str, total: int, unit: str, *, done: int = 0) -> Progress:
        bar = progress(self, label, total, unit, done=done)
        if label == "unpack":
            update = bar.update
            totals.append(total)
            monkeypatch.setattr(bar, "update", lambda count: (units.append(count), update(count)))
        return bar

    monkeypatch.setattr(StageDirectory, "progress", watched)
    download(packed, folder.parent / "out")
    assert totals == [4 * packed.stat().st_size]
    assert sum(units) == totals[0] < 1 << 20


def test_what_cannot_be_fetched_is_refused_in_one_line(tmp_path: Path, stage: Stage) -> None:
    (tmp_path / "text.txt").write_text("no archive" * 1000)
    (tmp_path / "empty").mkdir()
    write(tmp_path / "twice/a/x_training_0.hdf5")
    write(tmp_path / "twice/b/x_training_0.hdf5")
    for url, message in (
        ("gopher://host/x", "gopher:// is unknown; allowed: s3://, https://, http://, file:// and plain paths"),
        ("s3://bucket", "is not an object in S3; write s3://bucket/key"),
        ("s3://bucket/folder/", "is a folder in S3; give one archive"),
        ("https:///shards.tar", "names no host"),
        ("file://host/x", "names the host host"),
        (tmp_path / "none.tar", "there is no archive or folder"),
        (tmp_path / "text.txt", "is not a tar archive"),
        (tmp_path / "empty", "has no training shard"),
        (tmp_path / "twice", "two files share a name"),
    ):
        assert message in refused(url, tmp_path / "out" / Path(str(url)).name)
    for words, message in (
        (("gopher://host/x",), "cannot fetch gopher://host/x"),
        (("x.tar", "--sha256", "12"), "--sha256 is 12; give 64 hexadecimal digits"),
        (("x.tar", "--connections", 0), "--connections is 0; allowed: a whole number from 1 to 64"),
        (("x.tar", "--processes", -1), "--processes is -1"),
    ):
        assert_one_line_error(stage("download", *words, "--out", tmp_path / "o"), message)
        assert not (tmp_path / "o").exists()


def test_the_identity_is_content_not_place(folder: Path) -> None:
    def identity(url: str) -> Identity:
        return DownloadOptions(url=Secret.address(url)).identity()

    copied = folder.parent / "copy"
    shutil.copytree(folder, copied)
    assert identity(str(folder)) == identity(copied.as_uri())
    write(copied / "deep/wiki_training_0.hdf5", largest=98)
    assert identity(str(folder)) != identity(str(copied))
