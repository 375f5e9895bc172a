"""The data and the model that most training tests use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.support import write_dataset, write_model_config


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """131 samples in four shards."""
    return write_dataset(tmp_path_factory.mktemp("data"), [37, 40, 23, 31])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config.json of the smallest model."""
    return write_model_config(tmp_path_factory.mktemp("model"))
