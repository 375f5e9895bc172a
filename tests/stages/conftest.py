from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.ready import write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two training shards, a test shard, and the other files that are found in such folders."""
    for number in range(2):
        write(tmp_path / f"in/deep/wiki_training_{number}.hdf5", rows=6 + number)
    write(tmp_path / "in/deep/wiki_test_0.hdf5", rows=3)
    (tmp_path / "in/deep/README.txt").write_text("About these files")
    (tmp_path / "in/deep/._wiki_training_0.hdf5").write_text("left by macOS")
    return tmp_path / "in"
