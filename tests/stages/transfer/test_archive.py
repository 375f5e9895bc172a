"""Archives: unpacked only where that is safe, and only if they are whole."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import pytest

from common.errors import UserError
from stages.transfer import archive
from stages.transfer.archive import members
from tests.helpers.ready import pack, refused


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


@pytest.mark.parametrize("mode", ["", "gz", "zst"])
def test_an_archive_cut_anywhere_is_damaged(folder: Path, mode: str) -> None:
    path = pack(folder, mode)
    whole = path.read_bytes()
    # Also at the very end of a member, which tarfile itself takes as the end of the archive.
    with tarfile.open(pack(folder, "")) as tar:
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
    path.write_bytes(altered[:-8] + whole[-8:])  # the checksum of the unaltered bytes
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
