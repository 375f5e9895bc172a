"""Small image sets in MNIST's file format, for tests that must not depend on MNIST."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np


def write_idx(path: Path, values: np.ndarray) -> None:
    """`values` (uint8) as a gzip'd IDX file, following the format's own description."""
    header = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
    path.write_bytes(gzip.compress(header + values.astype(np.uint8).tobytes(), mtime=0))


def write_images(directory: Path, *, training: int) -> Path:
    """Images that can be told apart: each class has a stripe of its own, under noise; 40 are held out."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for prefix, count in (("train", training), ("t10k", 40)):
        labels = rng.integers(0, 10, count)
        images = rng.integers(0, 100, (count, 28, 28))
        images[np.arange(count), 2 * labels + 3] = 255
        write_idx(directory / f"{prefix}-images-idx3-ubyte.gz", images)
        write_idx(directory / f"{prefix}-labels-idx1-ubyte.gz", labels)
    return directory
