"""IDX files, the format of MNIST: a magic number that names type and dimensions, their sizes, and the bytes."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.errors import UserError

#: Values of 8 bits: the second byte from the right in the magic number, yann.lecun.com/exdb/mnist.
_UINT8 = 8
#: More values than any file of this kind has.
_VALUES_MAX = 1 << 31


def read_idx(path: Path, *, dimensions: int) -> NDArray[np.uint8]:
    """All values of a gzip'd IDX file with that many dimensions. Raises `UserError` if it is not one, or not whole."""
    try:
        with gzip.open(path) as file:
            header = np.frombuffer(file.read(4 * (1 + dimensions)), dtype=">u4")
            magic = _UINT8 << 8 | dimensions
            if len(header) != 1 + dimensions or header[0] != magic:
                raise UserError(
                    f"{path} is not an IDX file of {dimensions} dimension(s): it begins with "
                    f"{header[:1].tobytes().hex() or 'nothing'}, expected {magic:08x}; fetch it again"
                )
            shape = tuple(int(size) for size in header[1:])
            expected = int(np.prod(shape, dtype=object))
            # Reading one more than there should be shows whether a file is too long, without unpacking all of it.
            values = file.read(min(expected, _VALUES_MAX) + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"cannot read {path}: {error}; give the gzip'd file, or fetch it again") from error
    if len(values) != expected:
        seen = "more" if len(values) > expected else str(len(values))
        raise UserError(f"{path} holds {seen} values where its header says {expected}; fetch it again")
    return np.frombuffer(values, np.uint8).reshape(shape)
