"""Ready-made shards: folders and archives of them, and the stage that takes them in."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import UserError
from common.secrets import Secret
from common.zstd import zstd
from stages.directory.manifest import StageDirectory
from stages.download import DownloadOptions, download_dataset
from trainer.data.shards import write_shard


def write(path: Path, *, rows: int = 6, S: int = 16, P: int = 2, largest: int = 99) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "input_ids": np.full((rows, S), largest, np.uint16),
        "input_mask": np.ones((rows, S), np.uint8),
        "segment_ids": np.zeros((rows, S), np.uint8),
        "masked_lm_positions": np.ones((rows, P), np.uint16),
        "masked_lm_ids": np.full((rows, P), largest, np.uint16),
        "next_sentence_labels": np.zeros(rows, np.uint8),
    }
    write_shard(path, arrays)
    return path


def write_random(path: Path, *, seed: int) -> Path:
    """800 rows of 512 random ids: enough bytes for downloads in several ranges."""
    rows = 800
    rng = np.random.default_rng(seed)
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "input_ids": rng.integers(0, 30000, (rows, 512), np.uint16),
        "input_mask": np.ones((rows, 512), np.uint8),
        "segment_ids": np.zeros((rows, 512), np.uint8),
        "masked_lm_positions": rng.integers(0, 512, (rows, 80), np.uint16),
        "masked_lm_ids": rng.integers(0, 30000, (rows, 80), np.uint16),
        "next_sentence_labels": rng.integers(0, 2, rows, np.uint8),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_shard(path, arrays)
    return path


def write_random_shards(folder: Path, count: int) -> Path:
    """`count` training shards of 1.9 MB in `folder`."""
    for number in range(count):
        write_random(folder / f"x_training_{number}.hdf5", seed=number)
    return folder


def pack(folder: Path, mode: str) -> Path:
    path = folder.parent / f"shards.tar.{mode}" if mode else folder.parent / "shards.tar"
    if mode == "zst":
        checked = {zstd.CompressionParameter.checksum_flag: 1}
        path.write_bytes(zstd.compress(pack(folder, "").read_bytes(), options=checked))
        return path
    with tarfile.open(path, f"w:{mode}") as tar:  # type: ignore[call-overload]
        tar.add(folder, "shards")
    return path


def download(url: object, out: Path, **options: Any) -> dict[str, Any]:
    asked = DownloadOptions(url=Secret.address(str(url)), **{"processes": 1, **options})
    with StageDirectory.begin(out, asked.identity) as work:
        return download_dataset(work, asked)


def refused(url: object, out: Path, **options: Any) -> str:
    with pytest.raises(UserError) as error:
        download(url, out, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def bytes_of(directory: Path) -> dict[str, bytes]:
    """The shards in a directory or below."""
    return {path.name: path.read_bytes() for path in directory.rglob("*.hdf5") if not path.name.startswith(".")}
