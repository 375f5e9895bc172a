"""The shard format: readable whoever wrote it, written identically every time, refused in one line if it is wrong."""

from __future__ import annotations

import errno
import json
import math
import os
import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import trainer.data.shards as shards_module
from common.errors import UserError
from tests.helpers.support import assert_one_line_error, command, write_dataset
from trainer.data.hdf5 import open_hdf5
from trainer.data.shards import KEYS, ShardSet, write_shard
from trainer.data.validation import validate_file

Arrays = dict[str, np.ndarray[Any, Any]]


def some_rows(rows: int = 40, *, S: int = 16, P: int = 3, seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    return {
        "input_ids": rng.integers(0, 100, (rows, S)).astype(np.uint16),
        "input_mask": (np.arange(S) < rng.integers(1, S + 1, (rows, 1))).astype(np.uint8),
        "segment_ids": rng.integers(0, 2, (rows, S)).astype(np.uint8),
        "masked_lm_positions": rng.integers(0, S, (rows, P)).astype(np.uint16),
        "masked_lm_ids": rng.integers(0, 100, (rows, P)).astype(np.uint16),
        "next_sentence_labels": rng.integers(0, 2, rows).astype(np.uint8),
    }


def write_chunked(path: Path, arrays: Arrays) -> None:
    """As NVIDIA's script writes them: int32 or int8, gzip 4, automatic chunks."""
    with h5py.File(path, "w") as file:
        for key, values in arrays.items():
            small = key in ("input_mask", "segment_ids", "next_sentence_labels")
            file.create_dataset(key, data=values, dtype="i1" if small else "i4", compression="gzip")


def test_a_written_shard_reads_back_with_plain_h5py_contiguous_and_uncompressed(tmp_path: Path) -> None:
    arrays = some_rows()
    write_shard(tmp_path / "a_training_0.hdf5", arrays)
    with h5py.File(tmp_path / "a_training_0.hdf5") as file:
        assert sorted(file) == sorted(KEYS)
        for key in KEYS:
            assert file[key].chunks is None
            assert file[key].compression is None
            assert file[key].dtype == arrays[key].dtype
            np.testing.assert_array_equal(file[key][()], arrays[key])
    assert [path.name for path in tmp_path.iterdir()] == ["a_training_0.hdf5"]


def test_the_same_rows_are_the_same_bytes(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.hdf5", some_rows())
    write_shard(tmp_path / "b.hdf5", some_rows())
    assert (tmp_path / "a.hdf5").read_bytes() == (tmp_path / "b.hdf5").read_bytes()


@pytest.mark.parametrize("write", [write_shard, write_chunked])
def test_any_rows_are_read_in_any_order_from_any_layout(tmp_path: Path, write: Any) -> None:
    written = [some_rows(40 + shard, seed=shard) for shard in range(5)]
    for shard, arrays in enumerate(written):
        write(tmp_path / f"x_training_{shard}.hdf5", arrays)
    shards = ShardSet.open(tmp_path, seq_len=16, max_pred_len=3)
    assert shards.names == [f"x_training_{shard}.hdf5" for shard in range(5)]
    assert shards.rows_per_shard.tolist() == [40, 41, 42, 43, 44]
    assert (shards.rows, shards.seq_len, shards.max_pred_len) == (210, 16, 3)
    rows = np.array([39, 0, 7, 7])
    for shard in [3, 0, 4, 1, 2, 0, 3]:  # more shards than are kept decoded
        got = shards.read(shard, rows)
        assert set(got) == set(KEYS)
        for key in KEYS:
            np.testing.assert_array_equal(got[key], written[shard][key][rows])


@pytest.mark.parametrize(("room", "most_decoded"), [(1 << 30, 5), (1, 1)])
def test_what_is_decoded_is_kept_as_long_as_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, most_decoded: int
) -> None:
    """The shards of a block are read again and again; even without room, the one in use is kept."""
    written = [some_rows(40, seed=shard) for shard in range(5)]
    for shard, arrays in enumerate(written):
        write_chunked(tmp_path / f"x_training_{shard}.hdf5", arrays)
    opened: list[str] = []
    monkeypatch.setattr(shards_module, "_DECODED_BYTES", room)
    monkeypatch.setattr(shards_module, "open_hdf5", lambda path: opened.append(path.name) or open_hdf5(path))
    shards = ShardSet.open(tmp_path, seq_len=16, max_pred_len=3)
    opened.clear()
    for shard in [*range(5), *range(5), 4]:
        np.testing.assert_array_equal(shards.read(shard, np.array([7]))["input_ids"], written[shard]["input_ids"][[7]])
    assert len(opened) == (5 if room > 1 else 10)
    assert len(shards._decoded) == most_decoded


def test_nvidias_own_files_are_valid_and_read_as_h5py_reads_them(shared: Path) -> None:
    directory = shared / "fixtures/nvidia_hdf5/seq128"
    shards = ShardSet.open(directory)
    path = directory / shards.names[0]
    assert validate_file(path, seq_len=128, max_pred_len=20, vocab_size=8192) == shards.rows == 4188
    rows = np.array([4187, 5])
    got = shards.read(0, rows)
    assert got["input_ids"].dtype == np.uint16
    with h5py.File(path) as file:
        for key in KEYS:
            np.testing.assert_array_equal(got[key], file[key][()][rows])


def test_row_counts_come_from_the_manifest_and_files_are_opened_only_when_read(tmp_path: Path) -> None:
    write_shard(tmp_path / "x_training_0.hdf5", some_rows(5))
    (tmp_path / "x_training_1.hdf5").write_bytes(b"no HDF5 at all")
    manifest = {"counts": {"rows": {"x_training_0.hdf5": 5, "x_training_1.hdf5": 7}}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    shards = ShardSet.open(tmp_path)
    assert shards.rows == 12
    with pytest.raises(UserError, match=r"x_training_1.hdf5 is not a whole HDF5 file"):
        shards.read(1, np.array([0]))


def test_of_ten_thousand_shards_only_the_first_is_opened(tmp_path: Path) -> None:
    """The others are empty: opening any of them would be an error."""
    names = [f"x_training_{number:05d}.hdf5" for number in range(10_000)]
    write_shard(tmp_path / names[0], some_rows(5))
    for name in names[1:]:
        (tmp_path / name).touch()
    (tmp_path / "manifest.json").write_text(json.dumps({"counts": {"rows": dict.fromkeys(names, 5)}}))
    assert ShardSet.open(tmp_path).rows == 50_000
    (tmp_path / names[7]).unlink()
    with pytest.raises(UserError, match="x_training_00007.hdf5 is in the manifest but missing"):
        ShardSet.open(tmp_path)


def test_what_cannot_be_opened_is_refused_in_one_line(tmp_path: Path) -> None:
    def refused(seq_len: int | None = None, max_pred_len: int | None = None) -> str:
        with pytest.raises(UserError) as error:
            ShardSet.open(tmp_path / "d", seq_len=seq_len, max_pred_len=max_pred_len)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "there is no data set directory" in refused()
    (tmp_path / "d").mkdir()
    assert "no file in" in refused()
    path = tmp_path / "d" / "x_training_0.hdf5"
    write_shard(path, some_rows())
    assert "has sequences of 16 tokens; 32 were asked for" in refused(seq_len=32)
    assert "3 predictions a sequence; at most 2" in refused(max_pred_len=2)
    assert ShardSet.open(tmp_path / "d", max_pred_len=20).max_pred_len == 3
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "is not a whole HDF5 file (" in refused()
    path.unlink()
    with h5py.File(path, "w") as file:
        file["input_ids"] = np.zeros((2, 4), np.int32)
    assert "has no dataset input_mask" in refused()


@pytest.mark.parametrize("place", ["d", "d/manifest.json"])
def test_a_directory_or_manifest_without_permission_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """As the system refuses them; root, who may run the tests, is refused nothing."""
    (tmp_path / "d").mkdir()
    write_shard(tmp_path / "d" / "x_training_0.hdf5", some_rows())
    denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(tmp_path / place))

    def refuse(*_: Any) -> Any:
        raise denied

    if place == "d":
        monkeypatch.setattr(os, "scandir", refuse)
    else:
        monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(UserError, match=r"cannot read the data set .*/d: .*Permission denied: .*; check") as error:
        ShardSet.open(tmp_path / "d")
    monkeypatch.undo()
    assert str(tmp_path / place) in str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("input_ids", 100, "input_ids is 100 in row 30; allowed: 0 to 99"),
        ("masked_lm_ids", 100, "masked_lm_ids is 100 in row 30; allowed: 0 to 99"),
        ("masked_lm_positions", 16, "masked_lm_positions is 16 in row 30; allowed: 0 to 15"),
        ("next_sentence_labels", 2, "next_sentence_labels is 2 in row 30; allowed: 0 to 1"),
        ("input_mask", 2, "input_mask is 2 in row 30; allowed: 0 to 1"),
        ("segment_ids", -1, "segment_ids is -1 in row 30"),
    ],
)
def test_validation_names_file_key_row_and_value(tmp_path: Path, key: str, value: int, message: str) -> None:
    arrays = some_rows()
    assert arrays["input_ids"].max() < 100
    arrays[key] = arrays[key].astype(np.int32)
    arrays[key][30] = value
    path = tmp_path / "x_training_0.hdf5"
    write_chunked(path, arrays)
    with pytest.raises(UserError) as error:
        validate_file(path, seq_len=16, max_pred_len=3, vocab_size=100)
    assert str(error.value).startswith(f"{path}: {message}")


def test_a_file_that_claims_far_more_than_it_can_hold_is_refused_without_reading_it(tmp_path: Path) -> None:
    """Every chunk is written, as zeros that were deflated twice."""
    path, rows = tmp_path / "x_training_0.hdf5", 1 << 18
    with h5py.File(path, "w") as file:
        for key, values in some_rows().items():
            shape = (rows, *values.shape[1:])
            twice = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            twice.set_chunk((1 << 15, *shape[1:]))
            twice.set_deflate(9)
            twice.set_deflate(9)
            space = h5py.h5s.create_simple(shape)
            h5py.h5d.create(file.id, key.encode(), h5py.h5t.STD_I32LE, space, twice)
            zeros = zlib.compress(zlib.compress(bytes(4 * (1 << 15) * math.prod(shape[1:])), 9), 9)
            for first in range(0, rows, 1 << 15):
                file[key].id.write_direct_chunk((first, *(0 for _ in shape[1:])), zeros)
            assert not file[key][-10:].any()
    with pytest.raises(UserError, match=f"claims {rows} rows but is far too small"):
        validate_file(path)


@pytest.mark.parametrize("size", [0, 5000, -1])
def test_a_shard_cut_short_under_a_reader_is_one_line(tmp_path: Path, size: int) -> None:
    """In another process, since reading beyond the end of a mapped file kills it without a message."""
    directory = write_dataset(tmp_path / "data", [300])
    program = f"""
import os
import sys
import numpy as np
from pathlib import Path
from trainer.data.shards import ShardSet
from common.errors import UserError
shards = ShardSet.open(Path({str(directory)!r}))
rows = np.arange(300)
shards.read(0, rows[:3])
path = shards.directory / shards.names[0]
os.truncate(path, {size} % path.stat().st_size)  # -1: of all but the last byte
try:
    shards.read(0, rows)
except UserError as error:
    sys.exit(f"error: {{error}}")
"""
    assert_one_line_error(command("-c", program), "synthetic_training_0.hdf5", "has been cut short", "make or fetch it")


def test_as_many_shards_as_are_mapped_at_a_time_and_the_latest_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each keeps a descriptor and address space: of a thousand shards a worker would run out."""
    shards = ShardSet.open(write_dataset(tmp_path, [7] * 40))
    opened: list[str] = []
    usual = shards_module.open_hdf5

    def counted(path: Path) -> Any:
        opened.append(path.name)
        return usual(path)

    monkeypatch.setattr(shards_module, "open_hdf5", counted)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(40):
        with open_hdf5(tmp_path / shards.names[number]) as file:
            np.testing.assert_array_equal(shards.read(number, np.arange(7))["input_ids"], file["input_ids"][()])
    assert len(opened) == 40
    assert len(os.listdir("/proc/self/fd")) - before <= 17
    for number in (24, 39, 30, 24):
        shards.read(number, np.arange(7))
    assert len(opened) == 40, "the latest 16"
    shards.read(0, np.arange(1))
    assert opened[40:] == [shards.names[0]]
