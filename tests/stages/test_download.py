"""Ready-made shards: taken whole and checked, or refused in one line with nothing harmed."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stages import archive
from stages.archive import members
from stages.download import DownloadOptions, download_dataset
from stages.manifest import StageDirectory
from tests.conftest import Stage
from trainer.data.shards import ShardSet, write_shard
from trainer.errors import UserError


def write(path: Path, *, rows: int = 6, S: int = 16, largest: int = 99) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "input_ids": np.full((rows, S), largest, np.uint16),
        "input_mask": np.ones((rows, S), np.uint8),
        "segment_ids": np.zeros((rows, S), np.uint8),
        "masked_lm_positions": np.ones((rows, 2), np.uint16),
        "masked_lm_ids": np.full((rows, 2), largest, np.uint16),
        "next_sentence_labels": np.zeros(rows, np.uint8),
    }
    write_shard(path, arrays)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two training shards, a test shard, and what else lies about in such folders."""
    for number in range(2):
        write(tmp_path / f"in/deep/wiki_training_{number}.hdf5", rows=6 + number)
    write(tmp_path / "in/deep/wiki_test_0.hdf5", rows=3)
    (tmp_path / "in/deep/README.txt").write_text("About these files")
    (tmp_path / "in/deep/._wiki_training_0.hdf5").write_text("left by macOS")
    return tmp_path / "in"


def pack(folder: Path, mode: str) -> Path:
    path = folder.parent / f"shards.tar.{mode}"
    if mode == "zst":
        zstandard = pytest.importorskip("zstandard", reason="the zstandard library is not installed")
        pack(folder, "").rename(path)
        path.write_bytes(zstandard.compress(path.read_bytes()))
        return path
    with tarfile.open(path, f"w:{mode}") as tar:  # type: ignore[call-overload]
        tar.add(folder, "shards")
    return path


def download(url: object, out: Path, **limits: int) -> dict[str, Any]:
    options = DownloadOptions(str(url), **limits)
    with StageDirectory.begin(out, options.identity) as work:
        return download_dataset(work, options)


def refused(url: object, out: Path, **limits: int) -> str:
    with pytest.raises(UserError) as error:
        download(url, out, **limits)
    assert "\n" not in str(error.value)
    return str(error.value)


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
    assert "wiki_training_1.hdf5" not in {file.name for file in there}
    assert stage("download", path, "--out", out).returncode == 0
    assert {file: file.stat().st_mtime_ns for file in there} == there
    assert ShardSet.open(out).rows == 13


@pytest.mark.parametrize(
    ("name", "kind", "reason"),
    [
        ("../evil_training_0.hdf5", tarfile.REGTYPE, "a path with '..'"),
        ("/tmp/evil_training_0.hdf5", tarfile.REGTYPE, "an absolute path"),
        ("a_training_0.hdf5", tarfile.SYMTYPE, "a link"),
        ("a_training_0.hdf5", tarfile.LNKTYPE, "a link"),
        ("a_training_0.hdf5", tarfile.CHRTYPE, "a device or pipe"),
        ("a_training_0.hdf5", tarfile.FIFOTYPE, "a device or pipe"),
    ],
)
def test_unsafe_members_are_refused_by_name(tmp_path: Path, name: str, kind: bytes, reason: str) -> None:
    with tarfile.open(tmp_path / "bad.tar", "w") as tar:
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind, "/etc/passwd"
        tar.addfile(info, io.BytesIO())
    message = refused(tmp_path / "bad.tar", tmp_path / "out")
    assert f"has the member {name!r}, {reason}" in message
    assert not list(tmp_path.rglob("*.hdf5"))


@pytest.mark.parametrize("mode", ["", "gz"])
def test_an_archive_cut_anywhere_is_damaged(folder: Path, mode: str) -> None:
    path = pack(folder, mode)
    whole = path.read_bytes()
    # Also at the very end of a member, which tarfile itself takes for the end of the archive.
    with tarfile.open(path) as tar:
        ends = [info.offset_data + -(-info.size // 512) * 512 for info in tar]
    cuts = [1, 100, len(whole) // 3, len(whole) // 2, *(ends if not mode else [len(whole) - 1])]
    for number, cut in enumerate(cuts):
        path.write_bytes(whole[:cut])
        message = refused(path, folder.parent / f"out{number}")
        assert "is damaged or cut off" in message or "is not a tar archive" in message
        assert not list(folder.parent.glob("out*/*.hdf5*"))


def test_one_altered_bit_in_a_packed_archive_is_found(folder: Path) -> None:
    path = pack(folder, "gz")
    unpacked = bytearray(gzip.decompress(path.read_bytes()))
    where = unpacked.index(bytes([99, 0, 99, 0, 99, 0]))  # ids, still in range when altered
    whole = gzip.compress(bytes(unpacked))
    unpacked[where] ^= 1
    altered = gzip.compress(bytes(unpacked))
    path.write_bytes(altered[:-8] + whole[-8:])  # the checksum of what it was
    assert "is damaged or cut off (CRC check failed" in refused(path, folder.parent / "out")
    assert not list(folder.parent.glob("out/*.hdf5*"))


def test_an_archive_of_too_many_bytes_or_members_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = pack(folder, "gz")
    with monkeypatch.context() as patch:
        patch.setattr(archive, "MEMBERS_MAX", 3)
        with pytest.raises(UserError, match="more than 3 members"):
            list(members(path))
    with tarfile.open(tmp_path / "bomb.tar.gz", "w:gz") as tar:
        info = tarfile.TarInfo("zeros_training_0.hdf5")
        info.size = 4 << 20
        tar.addfile(info, io.BytesIO(bytes(info.size)))
    monkeypatch.setattr(archive, "_UNPACKED_MIN_BYTES", 0)
    assert "unpacks to more than 200 times its size" in refused(tmp_path / "bomb.tar.gz", tmp_path / "out")
    assert not (tmp_path / "out/zeros_training_0.hdf5").exists()


def test_invalid_shards_are_refused_by_file_key_row_and_value(folder: Path) -> None:
    out = folder.parent / "out"
    message = refused(pack(folder, ""), out, vocab_size=50)
    assert "shards.tar.: shards/deep/wiki_t" in message
    assert "input_ids is 99 in row 0; allowed is 0 to 49" in message
    assert not list(out.glob("*.hdf5*"))
    assert "has sequences of 16 tokens; 128 were asked for" in refused(folder, folder.parent / "o2", seq_len=128)
    write(folder / "other_training_9.hdf5", S=32)
    assert "has sequences of" in refused(folder, folder.parent / "o3")


def test_what_cannot_be_fetched_is_refused_in_one_line(tmp_path: Path, stage: Stage) -> None:
    (tmp_path / "text.txt").write_text("no archive" * 1000)
    (tmp_path / "empty").mkdir()
    write(tmp_path / "twice/a/x_training_0.hdf5")
    write(tmp_path / "twice/b/x_training_0.hdf5")
    for url, message in (
        ("s3://bucket/shards.tar", "s3:// is not built yet"),
        ("https://host/shards.tar", "https:// is not built yet"),
        ("gopher://host/x", "gopher:// is unknown"),
        ("file://host/x", "names the host host"),
        (tmp_path / "none.tar", "there is no archive or folder"),
        (tmp_path / "text.txt", "is not a tar archive"),
        (tmp_path / "empty", "has no training shard"),
        (tmp_path / "twice", "two files of one name"),
    ):
        assert message in refused(url, tmp_path / "out" / Path(str(url)).name)
    ran = stage("download", "s3://bucket/shards.tar", "--out", tmp_path / "o")
    assert (ran.returncode, ran.stderr.count("\n")) == (1, 1)
    assert ran.stderr.startswith("error: cannot fetch s3://bucket/shards.tar")
    assert not (tmp_path / "o").exists()


def test_the_identity_is_content_not_place(folder: Path) -> None:
    copied = folder.parent / "copy"
    shutil.copytree(folder, copied)
    assert DownloadOptions(str(folder)).identity() == DownloadOptions(copied.as_uri()).identity()
    write(copied / "deep/wiki_training_0.hdf5", largest=98)
    assert DownloadOptions(str(folder)).identity() != DownloadOptions(str(copied)).identity()
