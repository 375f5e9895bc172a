"""The wheel has everything that the program reads: luigi.cfg, configs/, templates, the style sheet."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.helpers.chain import Chain
from tests.helpers.support import ROOT


@pytest.mark.slow
def test_the_wheel_runs_in_an_empty_folder(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="pip install hatchling, which builds the wheel")
    build = ("-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path))
    subprocess.run([sys.executable, *build], cwd=ROOT, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    chain = Chain(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed"), "LUIGI_CONFIG_PATH": str(chain.config)}
    empty = tmp_path / "empty"
    empty.mkdir()

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words], cwd=empty, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert str(tmp_path) in run("-c", "import pipeline; print(pipeline.__file__)")
    run("-m", "luigi", "--module", "pipeline", "ShardDataset", "--phase", "1")
    assert (chain.work / "latest" / "shard_dataset-phase1" / "manifest.json").exists()
    run("-m", "pipeline", "report")
    assert not list(empty.iterdir())
    made = tmp_path / "made"
    assert "for trn1, as asked" in run("-m", "pipeline", "init", "--for", "trn1", str(made))
    assert "phase1_url = s3://" in (made / "luigi.cfg").read_text()
    doctor = run("-m", "pipeline", "doctor", "ShardDataset", "--phase", "1")
    assert "packages as pyproject.toml requires" in doctor, doctor
